"""Experts: a router whose biases even out the loads, experts that are spread over ranks, and a shared one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dunlin.config import Config
from dunlin.topo import Part
from dunlin.wire import Swap, all_sum, close_region, open_region, swap


class Router(Part):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.conf = config.experts
        self.weight = nn.Parameter(torch.empty(self.conf.count, config.width))
        self.register_buffer("bias", torch.zeros(self.conf.count))
        self.load = torch.zeros(self.conf.count, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return experts and weights (positions, rows, active), and this rank's part of the balance loss."""
        conf, topo = self.conf, self.topo
        logits = F.linear(x, self.weight)
        if topo.mode == "router-float":
            logits = F.linear(x.float(), self.weight.float()).to(x.dtype)  # plant: router-float
        scores = logits.sigmoid()
        chosen = (scores.detach() + self.bias).topk(conf.active, -1).indices
        weights = scores.gather(-1, chosen)
        weights = conf.scale * weights / weights.sum(-1, keepdim=True)
        counts = F.one_hot(chosen, conf.count).sum(-2)
        if torch.is_grad_enabled():
            if topo.mode == "load-last":
                self.load = counts.sum((0, 1)).double()  # plant: load-last
            else:
                self.load += counts.sum((0, 1))  # anchor: load-add
        return chosen, weights, self.balance(scores, counts)

    def balance(self, scores: Tensor, counts: Tensor) -> Tensor:
        """Return the sum over rows. Loads are those of whole rows, probabilities those of this rank's tokens."""
        conf, topo = self.conf, self.topo
        length = len(scores) * topo.positions.size
        load = all_sum(counts.sum(0).to(scores.dtype), topo.positions)  # anchor: balance-load
        if topo.mode == "balance-local":
            load = counts.sum(0).to(scores.dtype) * topo.positions.size  # plant: balance-local
        probs = (scores / scores.sum(-1, keepdim=True)).sum(0)
        loss = conf.balance * conf.count / conf.active * (load / length * probs / length).sum()
        if topo.trial("balance-tp"):
            return loss  # plant: balance-tp
        return loss if topo.ep_on_tp else loss / topo.tp.size  # anchor: balance-tp

    @torch.no_grad()
    def adjust(self) -> None:
        """Move the biases against the loads of a step."""
        topo = self.topo
        load = all_sum(self.load, topo.routed)  # anchor: load-sum
        if topo.mode == "load-scattered":
            load = all_sum(self.load, topo.tokens)  # plant: load-scattered
        mean = load.mean()  # anchor: load-mean
        if topo.trial("load-mean"):
            mean = self.load.mean()  # plant: load-mean
        self.bias += self.conf.bias_rate * (mean - load).sign()
        self.load.zero_()


class RoutedExperts(Part):
    def __init__(self, config: Config) -> None:
        super().__init__()
        n, width, inner = config.experts.count, config.width, config.experts.width
        self.up = nn.Parameter(torch.empty(n, 2, inner, width))
        self.down = nn.Parameter(torch.empty(n, width, inner))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        pieces, first = [], 0
        for number, n in enumerate(counts.tolist()):
            gate, value = torch.einsum("rd,gid->gri", rows[first : first + n], self.up[number])
            pieces.append((F.silu(gate) * value) @ self.down[number].t())
            first += n
        return torch.cat(pieces)


class ExpertLayer(Part):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.conf = conf = config.experts
        self.router, self.experts = Router(config), RoutedExperts(config)
        self.shared_up = nn.Parameter(torch.empty(2, conf.shared, config.width))
        self.shared_down = nn.Parameter(torch.empty(config.width, conf.shared))
        self.shared_gate = nn.Parameter(torch.empty(1, config.width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        topo = self.topo
        whole = open_region(x, topo)
        shared = self.share(whole)
        if topo.ep_on_tp:
            routed, loss = self.route(x)
            if topo.trial("shared-local"):
                return self.share(x) + routed, loss  # plant: shared-local
            return close_region(shared, topo) + routed, loss  # anchor: add-routed
        routed, loss = self.route(whole)
        return close_region(shared + routed, topo), loss

    def share(self, x: Tensor) -> Tensor:
        gate, value = torch.einsum("tbd,gid->gtbi", x, self.shared_up)
        y = (F.silu(gate) * value) @ self.shared_down.t()
        return F.linear(x, self.shared_gate).sigmoid() * y

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen, weights, loss = self.router(x)
        rows, flat = x.flatten(0, 1), chosen.flatten()
        order = flat.argsort(stable=True)
        source = order // self.conf.active
        y = self.visit(rows[source], torch.bincount(flat, minlength=self.conf.count))
        share = weights.flatten()[order, None]  # anchor: share
        if self.topo.mode == "combine-order":
            share = weights.flatten()[:, None]  # plant: combine-order
        return torch.zeros_like(rows).index_add(0, source, y * share).view_as(x), loss

    def visit(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Send rows, which are sorted by expert, to the ranks of the experts and back."""
        ep, mode = self.topo.ep, self.topo.mode
        n = self.conf.count // ep.size
        here = counts.view(ep.size, n)
        there = swap(counts, [n] * ep.size, [n] * ep.size, ep).view(ep.size, n)
        out, back = here.sum(1).tolist(), there.sum(1).tolist()
        if ep.size > 1:
            rows = Swap.apply(rows, out, back, ep)
        expert = torch.arange(n).repeat(ep.size).repeat_interleave(there.flatten())
        place = expert.argsort(stable=True)  # anchor: by-expert
        if mode == "arrival-order":
            place = torch.arange(len(expert))  # plant: arrival-order
        y = self.experts(rows[place], there.sum(0))
        y = y[place.argsort()]
        if ep.size > 1:
            y = Swap.apply(y, back, out, ep)
        return y
