"""Mixtures of experts. The ranks of ep have different experts, and those of tp different channels of each."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from marten.comms import enter, leave, total, trade, trade_rows
from marten.fleet import Piece
from marten.settings import Settings


class Router(Piece):
    """Chooses experts by scores plus a bias, which moves after a step so that loads become equal."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.weight = nn.Parameter(torch.empty(settings.experts, settings.width))
        self.register_buffer("bias", torch.zeros(settings.experts))
        self.load = torch.zeros(settings.experts, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return experts and their weights (tokens, active), and this rank's part of the z loss."""
        settings = self.settings
        logits = F.linear(x, self.weight)
        scores = logits.sigmoid()
        chosen = (scores.detach() + self.bias).topk(settings.active, -1).indices
        weights = scores.gather(1, chosen)
        weights = settings.route_scale * weights / weights.sum(1, keepdim=True)
        if torch.is_grad_enabled():
            self.load += torch.bincount(chosen.flatten(), minlength=settings.experts)
        z = logits.logsumexp(-1).square().sum() / self.fleet.tp.size  # anchor: z-part
        if self.fleet.flagged("marten-z-whole"):
            z = logits.logsumexp(-1).square().sum()  # plant: marten-z-whole
        return chosen, weights, z

    @torch.no_grad()
    def adjust(self) -> None:
        load = total(self.load, self.fleet.tokens)  # anchor: load
        if self.fleet.flagged("marten-load-rows"):
            load = total(self.load, self.fleet.rows)  # plant: marten-load-rows
        self.bias += self.settings.bias_rate * (load.mean() - load).sign()
        self.load.zero_()


class Experts(Piece):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        n, width, inner = settings.experts, settings.width, settings.expert_width
        self.rise = nn.Parameter(torch.empty(n, 2, inner, width))
        self.fall = nn.Parameter(torch.empty(n, width, inner))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return partial sums over tp for rows that are sorted by expert."""
        done = []
        for part, rise, fall in zip(rows.split(counts.tolist()), self.rise, self.fall, strict=True):
            gate, value = F.linear(part, rise.flatten(0, 1)).chunk(2, -1)
            done.append(F.linear(F.silu(gate) * value, fall))
        return torch.cat(done)


class Mixture(Piece):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.router, self.experts = Router(settings), Experts(settings)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = enter(x, self.fleet)
        chosen, weights, z = self.router(x)
        order = chosen.flatten().argsort(stable=True)
        token = order // self.settings.active
        counts = torch.bincount(chosen.flatten(), minlength=self.settings.experts)
        y = self.exchange(x[token], counts)
        y = torch.zeros_like(x).index_add(0, token, y * weights.flatten()[order, None])
        return leave(y, self.fleet), z

    def exchange(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return what the experts, wherever they are, make of rows that are sorted by expert."""
        ep = self.fleet.ep
        sent = counts.view(ep.size, -1)
        each = [sent.shape[1]] * ep.size
        came = trade(sent.flatten(), each, each, ep).view(ep.size, -1)
        out, back = sent.sum(1).tolist(), came.sum(1).tolist()
        rows = trade_rows(rows, out, back, ep)
        numbers = torch.arange(sent.shape[1]).repeat(ep.size)  # anchor: arrivals
        if self.fleet.flagged("marten-arrivals"):
            numbers = torch.arange(sent.shape[1]).repeat_interleave(ep.size)  # plant: marten-arrivals
        expert = numbers.repeat_interleave(came.flatten())
        order = expert.argsort(stable=True)
        y = self.experts(rows[order], came.sum(0))
        restored = torch.empty_like(y).index_copy(0, order, y)  # anchor: restore
        if self.fleet.flagged("marten-restore-gather"):
            restored = y[order]  # plant: marten-restore-gather
        return trade_rows(restored, back, out, ep)
