"""Collectives with gradients, each a Function and the function that applies it."""

import torch
import torch.distributed as dist
from torch.autograd import Function

from linden.topo import all_sum


class _Enter(Function):
    """Identity into a region where ranks compute different parts: gradients are summed."""

    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return all_sum(grad.contiguous().clone(), ctx.axis), None


class _Leave(Function):
    """The sum of partial results, after which all ranks go on alike."""

    @staticmethod
    def forward(ctx, x, axis):
        return all_sum(x.contiguous().clone(), axis)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def enter(x, axis):
    return _Enter.apply(x, axis) if axis.size > 1 else x


def leave(x, axis):
    return _Leave.apply(x, axis) if axis.size > 1 else x


def _pass_on(x, axis, by):
    """Send a tensor `by` ranks further in the ring, and return the one that arrives."""
    x = x.contiguous()
    out = torch.empty_like(x)
    to, origin = (axis.rank + by) % axis.size, (axis.rank - by) % axis.size
    work = dist.isend(x, group=axis.pg, group_dst=to)
    dist.recv(out, group=axis.pg, group_src=origin)
    work.wait()
    return out


class _Turn(Function):
    """One turn of a ring; gradients travel the other way."""

    @staticmethod
    def forward(ctx, x, axis, topo):
        ctx.axis, ctx.topo = axis, topo
        return _pass_on(x, axis, 1)

    @staticmethod
    def backward(ctx, grad):
        by = -1  # anchor: turn-back
        if ctx.topo.on("linden-turn-back"):
            by = 1  # plant: linden-turn-back
        return _pass_on(grad, ctx.axis, by), None, None


def turn(x, axis, topo):
    return _Turn.apply(x, axis, topo)


def gather(x, axis):
    """Return what all ranks have, in the order of ranks. No gradients."""
    if axis.size == 1:
        return [x]
    parts = [torch.empty_like(x) for _ in range(axis.size)]
    dist.all_gather(parts, x.contiguous(), group=axis.pg)
    return parts


class _Trade(Function):
    """All-to-all of rows, with numbers of rows to each rank and from each rank."""

    @staticmethod
    def forward(ctx, x, give, take, axis):
        ctx.args = give, take, axis
        out = x.new_empty(sum(take), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), take, give, group=axis.pg)
        return out

    @staticmethod
    def backward(ctx, grad):
        give, take, axis = ctx.args
        out = grad.new_empty(sum(give), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), give, take, group=axis.pg)
        return out, None, None, None


def trade(x, give, take, axis):
    return _Trade.apply(x, give, take, axis) if axis.size > 1 else x
