"""A gated linear recurrence. Ranks of cp scan their own positions and then add what comes from before."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dunlin.batch import Batch
from dunlin.config import Config
from dunlin.conv import ShortConv
from dunlin.topo import Part, Topology
from dunlin.wire import Join, Pool, close_region, gather_positions, open_region


def scan(decay: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return states and products of decays at each position, from a state of zeros."""
    states, products = [value[0]], [decay[0]]
    for a, b in zip(decay[1:], value[1:], strict=True):
        states.append(a * states[-1] + b)
        products.append(a * products[-1])
    return torch.stack(states), torch.stack(products)


def scan_all(decay: Tensor, value: Tensor, topo: Topology) -> Tensor:
    states, products = scan(decay, value)
    cp = topo.cp
    if cp.size == 1:
        return states
    last = gather_positions(states[-1:], topo)
    fade = gather_positions(products[-1:], topo)
    carry = torch.zeros_like(states[0])
    for rank in range(cp.size):
        on = float(rank < cp.index)  # anchor: carry-ranks
        if topo.trial("carry-previous"):
            on = float(rank == cp.index - 1)  # plant: carry-previous
        kept = on * fade[rank] + (1 - on)  # anchor: carry-fade
        if topo.trial("carry-fade"):
            kept = 1.0  # plant: carry-fade
        carry = carry * kept + on * last[rank]
    if topo.trial("carry-detach"):
        carry = carry.detach()  # plant: carry-detach
    reach = products  # anchor: carry-reach
    if topo.mode == "carry-shift":
        reach = torch.cat([torch.ones_like(products[:1]), products[:-1]])  # plant: carry-shift
    return states + reach * carry


class ChannelNorm(Part):
    """A norm over channels that the ranks of tp share."""

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.channels, self.eps = channels, eps
        self.gain = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor) -> Tensor:
        tp = self.topo.tp
        squares = x.square().sum(-1, keepdim=True)
        if self.topo.mode == "norm-local":
            mean = squares / x.shape[-1]  # plant: norm-local
        elif self.topo.mode == "norm-join":
            mean = Join.apply(squares, tp) / self.channels  # plant: norm-join
        else:
            mean = Pool.apply(squares, tp) / self.channels  # anchor: channel-norm
        return x * (mean + self.eps).rsqrt() * self.gain


class GatedRecurrence(Part):
    def __init__(self, config: Config) -> None:
        super().__init__()
        rec, width = config.recurrence, config.width
        self.rec = rec
        head = rec.inner // rec.heads
        self.value = nn.Parameter(torch.empty(rec.inner, width))
        self.gate = nn.Parameter(torch.empty(rec.inner, width))
        self.conv = ShortConv(rec.inner, rec.kernel)
        self.keep = nn.Parameter(torch.empty(rec.heads, head, head))
        self.write = nn.Parameter(torch.empty(rec.heads, head, head))
        self.pace = nn.Parameter(torch.empty(rec.inner))
        self.norm = ChannelNorm(rec.inner, config.eps)
        self.out = nn.Parameter(torch.empty(width, rec.inner))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x = open_region(x, self.topo)
        u = self.conv(F.linear(x, self.value))
        heads = u.unflatten(-1, (len(self.keep), -1))
        keep = torch.einsum("tbhi,hij->tbhj", heads, self.keep).flatten(-2).sigmoid()
        write = torch.einsum("tbhi,hij->tbhj", heads, self.write).flatten(-2).sigmoid()
        rate = self.rec.sharpness * F.softplus(self.pace) * keep
        decay = (-rate).exp()
        value = (1 - decay.square() + 1e-6).sqrt() * write * u
        starts = batch.starts[..., None]
        if self.topo.mode == "reset-rank" and self.topo.cp.size > 1:
            starts = torch.cat([torch.ones_like(starts[:1]), starts[1:]])  # plant: reset-rank
        y = scan_all(decay.masked_fill(starts, 0.0), value, self.topo)  # anchor: reset
        y = self.norm(y) * F.silu(F.linear(x, self.gate))
        return close_region(F.linear(y, self.out), self.topo)
