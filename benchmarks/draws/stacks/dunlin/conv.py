"""A causal depthwise convolution of few taps. Its left border comes from the previous rank of cp."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from dunlin.topo import Part, Topology


def shift_ring(x: Tensor, topo: Topology, step: int) -> Tensor:
    """Send a tensor to the rank `step` places on, and return what arrives from the other side."""
    x, y = x.contiguous(), torch.zeros_like(x, memory_format=torch.contiguous_format)
    cp = topo.cp
    ops = [
        dist.P2POp(dist.isend, x, cp.rank_at(step), cp.pg),
        dist.P2POp(dist.irecv, y, cp.rank_at(-step), cp.pg),
    ]
    works = dist.batch_isend_irecv(ops)
    if topo.trial("halo-wait"):
        y = y.clone()  # plant: halo-wait
    for work in works:
        work.wait()  # anchor: halo-wait
    return y


class Halo(Function):
    """The last `n` positions of the previous rank, zeros on the first one."""

    @staticmethod
    def forward(ctx, x, n, topo):
        ctx.n, ctx.topo, ctx.shape = n, topo, x.shape
        edge = x[-n:]  # anchor: halo-edge
        if topo.trial("halo-head"):
            edge = x[:n]  # plant: halo-head
        step = 1  # anchor: halo-step
        if topo.trial("halo-left"):
            step = -1  # plant: halo-left
        halo = shift_ring(edge, topo, step)
        if topo.cp.is_first and not topo.trial("halo-wrap"):  # plant: halo-wrap
            halo.zero_()  # anchor: halo-zero
        return halo

    @staticmethod
    def backward(ctx, grad):
        topo, n = ctx.topo, ctx.n
        whole = grad.new_zeros(ctx.shape)
        if topo.cp.is_first:
            grad = torch.zeros_like(grad)
        if topo.trial("halo-grad"):
            whole[-n:] = grad  # plant: halo-grad
        else:
            whole[-n:] = shift_ring(grad, topo, -1)  # anchor: halo-back
        return whole, None, None


class ShortConv(Part):
    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.taps = taps
        self.kernel = nn.Parameter(torch.empty(channels, taps))

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (positions, rows, channels)."""
        n = self.taps - 1
        if self.topo.cp.size == 1:
            halo = x.new_zeros((n, *x.shape[1:]))
        else:
            halo = Halo.apply(x, n, self.topo)
        padded = torch.cat([halo, x])
        return torch.einsum("tbck,ck->tbc", padded.unfold(0, self.taps, 1), self.kernel)
