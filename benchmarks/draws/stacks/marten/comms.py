"""Collectives on dim 0, and pairs of them as the two passes of one function."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from marten.fleet import Crew, Fleet


def keep(x: Tensor, crew: Crew) -> Tensor:
    return x.view_as(x)


def total(x: Tensor, crew: Crew, op=dist.ReduceOp.SUM) -> Tensor:
    """Return the sum over ranks. The argument stays as it is."""
    if crew.size == 1:
        return x
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, op=op, group=crew.pg)
    return x


@torch.no_grad()
def collect(x: Tensor, crew: Crew) -> Tensor:
    if crew.size == 1:
        return x
    out = x.new_empty((crew.size * x.shape[0], *x.shape[1:]))
    dist.all_gather_into_tensor(out, x.contiguous(), group=crew.pg)
    return out


def collapse(x: Tensor, crew: Crew) -> Tensor:
    """Return this rank's part of the sum over ranks."""
    if crew.size == 1:
        return x
    out = x.new_empty((x.shape[0] // crew.size, *x.shape[1:]))
    dist.reduce_scatter_tensor(out, x.contiguous(), group=crew.pg)
    return out


def mine(x: Tensor, crew: Crew) -> Tensor:
    """Return this rank's part of what all ranks have."""
    n = x.shape[0] // crew.size
    return x[crew.rank * n : (crew.rank + 1) * n].contiguous()


def take_from_first(x: Tensor, crew: Crew) -> None:
    """Overwrite a tensor by that of the first rank."""
    if crew.size > 1:
        dist.broadcast(x, dist.get_global_rank(crew.pg, 0), group=crew.pg)


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, crew, there, back):
        ctx.crew, ctx.back = crew, back
        return there(x, crew)

    @staticmethod
    def backward(ctx, grad):
        return ctx.back(grad, ctx.crew), None, None, None


def pair(x: Tensor, crew: Crew, there, back) -> Tensor:
    return x if crew.size == 1 else _Pair.apply(x, crew, there, back)


def enter(x: Tensor, fleet: Fleet) -> Tensor:
    """Begin work in which each rank of tp has some channels of all tokens."""
    if fleet.scattered:
        return pair(x, fleet.tp, collect, collapse)
    if fleet.flagged("marten-enter-keep"):
        return pair(x, fleet.tp, keep, keep)  # plant: marten-enter-keep
    return pair(x, fleet.tp, keep, total)  # anchor: enter


def leave(x: Tensor, fleet: Fleet) -> Tensor:
    """End it: sum over the ranks, each of which keeps its own tokens if these are scattered."""
    if fleet.scattered:
        return pair(x, fleet.tp, collapse, collect)
    if fleet.flagged("marten-leave-total"):
        return pair(x, fleet.tp, total, total)  # plant: marten-leave-total
    return pair(x, fleet.tp, total, keep)  # anchor: leave


def pool(x: Tensor, crew: Crew) -> Tensor:
    """Sum values of which each rank then uses the whole for something of its own."""
    return pair(x, crew, total, total)


def agree(x: Tensor, crew: Crew) -> Tensor:
    """Sum values with which all ranks then compute the same."""
    return pair(x, crew, total, keep)


class _Trade(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, out, back, crew):
        ctx.sizes = back, out, crew
        return trade(x, out, back, crew)

    @staticmethod
    def backward(ctx, grad):
        return trade(grad, *ctx.sizes), None, None, None


def trade(x: Tensor, out: list[int], back: list[int], crew: Crew) -> Tensor:
    """Send so many rows to each rank, and get so many from each."""
    if crew.size == 1:
        return x
    y = x.new_empty((sum(back), *x.shape[1:]))
    dist.all_to_all_single(y, x.contiguous(), back, out, group=crew.pg)
    return y


def trade_rows(x: Tensor, out: list[int], back: list[int], crew: Crew) -> Tensor:
    return x if crew.size == 1 else _Trade.apply(x, out, back, crew)


def _rotate(x: Tensor, crew: Crew, offset: int) -> Tensor:
    x, y = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    send = dist.P2POp(dist.isend, x, crew.peer(offset), crew.pg)
    receive = dist.P2POp(dist.irecv, y, crew.peer(-offset), crew.pg)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return y


def _onward(x: Tensor, crew: Crew) -> Tensor:
    return _rotate(x, crew, 1)


def _backward(x: Tensor, crew: Crew) -> Tensor:
    return _rotate(x, crew, -1)


def hand_on(x: Tensor, fleet: Fleet) -> Tensor:
    """Give a tensor to the next rank of cp, and take that of the previous one."""
    if fleet.flagged("marten-ring-onward"):
        return pair(x, fleet.cp, _onward, _onward)  # plant: marten-ring-onward
    return pair(x, fleet.cp, _onward, _backward)  # anchor: ring-back
