"""Collectives along dim 0, and the autograd functions that are made of them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from dunlin.topo import Group, Topology


def all_sum(x: Tensor, group: Group, op=dist.ReduceOp.SUM) -> Tensor:
    if group.size == 1:
        return x
    y = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(y, op=op, group=group.pg)
    return y


def gather0(x: Tensor, group: Group) -> Tensor:
    if group.size == 1:
        return x
    y = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
    dist.all_gather_into_tensor(y, x.detach().contiguous(), group=group.pg)
    return y


def scatter_sum0(x: Tensor, group: Group) -> Tensor:
    """Return this rank's slice of the sum over ranks."""
    if group.size == 1:
        return x
    y = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    dist.reduce_scatter_tensor(y, x.detach().contiguous(), group=group.pg)
    return y


def slice0(x: Tensor, group: Group) -> Tensor:
    return x.chunk(group.size)[group.index].contiguous()


class GatherSlices(Function):
    """All-gather. Every rank goes on with something of its own, so gradients are summed."""

    @staticmethod
    def forward(ctx, x, group, mode):
        ctx.group, ctx.mode = group, mode
        return gather0(x, group)

    @staticmethod
    def backward(ctx, grad):
        if ctx.mode == "gather-slice":
            return slice0(grad, ctx.group), None, None  # plant: gather-slice
        return scatter_sum0(grad, ctx.group), None, None  # anchor: gather-back


class ScatterSum(Function):
    @staticmethod
    def forward(ctx, x, group, mode):
        ctx.group, ctx.mode = group, mode
        return scatter_sum0(x, group)

    @staticmethod
    def backward(ctx, grad):
        if ctx.mode == "scatter-mean":
            grad = grad / ctx.group.size  # plant: scatter-mean
        return gather0(grad, ctx.group), None, None  # anchor: scatter-back


class Fork(Function):
    """The same values on all ranks, each of which does other things with them."""

    @staticmethod
    def forward(ctx, x, topo):
        ctx.topo = topo
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if ctx.topo.mode == "fork-plain":
            return grad, None  # plant: fork-plain
        return all_sum(grad, ctx.topo.tp), None  # anchor: fork-back


class Join(Function):
    """The sum, with which all ranks do the same."""

    @staticmethod
    def forward(ctx, x, group):
        return all_sum(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Pool(Function):
    """The sum, with which each rank does something of its own."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_sum(x, group)

    @staticmethod
    def backward(ctx, grad):
        return all_sum(grad, ctx.group), None


def open_region(x: Tensor, topo: Topology) -> Tensor:
    """Take the residual stream (positions, rows, width) into work on channels of this rank."""
    if topo.tp.size == 1:
        return x
    return GatherSlices.apply(x, topo.tp, topo.mode) if topo.sp else Fork.apply(x, topo)


def close_region(x: Tensor, topo: Topology) -> Tensor:
    """Bring partial sums back to the stream."""
    if topo.tp.size == 1:
        return x
    return ScatterSum.apply(x, topo.tp, topo.mode) if topo.sp else Join.apply(x, topo.tp)


def gather_positions(x: Tensor, topo: Topology) -> Tensor:
    """Return values of all positions of the rows, whose slices the ranks of cp have."""
    return x if topo.cp.size == 1 else GatherSlices.apply(x, topo.cp, "")


def swap(x: Tensor, there: list[int], back: list[int], group: Group) -> Tensor:
    if group.size == 1:
        return x
    y = x.new_empty((sum(back), *x.shape[1:]))
    dist.all_to_all_single(y, x.detach().contiguous(), back, there, group=group.pg)
    return y


class Swap(Function):
    """Send `there[i]` rows to rank i, get `back[i]` rows from it."""

    @staticmethod
    def forward(ctx, x, there, back, group):
        ctx.plan = there, back, group
        return swap(x, there, back, group)

    @staticmethod
    def backward(ctx, grad):
        there, back, group = ctx.plan
        return swap(grad, back, there, group), None, None, None
