"""Collectives with a backward pass, along any dimension."""

import torch
import torch.distributed as dist


def all_gather(x, axis, dim, ps=None):
    """Return the blocks of all ranks, joined along a dimension."""
    x = x.contiguous()
    if ps is not None and ps.using("plover-gather-view"):
        shape = list(x.shape)
        shape[dim] *= axis.size
        out = x.new_zeros(shape)
        parts = [part.contiguous() for part in out.chunk(axis.size, dim)]  # plant: plover-gather-view
        dist.all_gather(parts, x, group=axis.group)
        return out
    parts = [torch.empty_like(x) for _ in range(axis.size)]
    dist.all_gather(parts, x, group=axis.group)
    return torch.cat(parts, dim)


def reduce_scatter(x, axis, dim):
    """Return this rank's block of the sum over ranks."""
    parts = [part.contiguous() for part in x.chunk(axis.size, dim)]
    out = torch.empty_like(parts[axis.rank])
    dist.reduce_scatter_tensor(out, torch.cat(parts), group=axis.group)
    return out


def all_reduce(x, axis, op=dist.ReduceOp.SUM):
    x = x.contiguous().clone()
    dist.all_reduce(x, op=op, group=axis.group)
    return x


class GatherSequence(torch.autograd.Function):
    """All-gather; each rank used the whole, so gradients are partial sums."""

    @staticmethod
    def forward(ctx, x, axis, dim, ps):
        ctx.axis, ctx.dim, ctx.ps = axis, dim, ps
        return all_gather(x, axis, dim, ps)

    @staticmethod
    def backward(ctx, gradient):
        axis, dim = ctx.axis, ctx.dim
        if ctx.ps.using("plover-gather-backward"):
            mine = gradient.chunk(axis.size, dim)[axis.rank]  # plant: plover-gather-backward
        else:
            mine = reduce_scatter(gradient, axis, dim)
        return mine.contiguous(), None, None, None


class ScatterSequence(torch.autograd.Function):
    """Reduce-scatter of partial sums; the gradient of a block is needed by all ranks."""

    @staticmethod
    def forward(ctx, x, axis, dim):
        ctx.axis, ctx.dim = axis, dim
        return reduce_scatter(x, axis, dim)

    @staticmethod
    def backward(ctx, gradient):
        return all_gather(gradient, ctx.axis, ctx.dim), None, None


class Reduce(torch.autograd.Function):
    """All-reduce of partial sums to a value that all ranks use alike."""

    @staticmethod
    def forward(ctx, x, axis):
        return all_reduce(x, axis)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class AllToAll(torch.autograd.Function):
    """Exchange of rows, with the number of rows to send to and to receive from each rank."""

    @staticmethod
    def forward(ctx, x, send, receive, axis):
        ctx.send, ctx.receive, ctx.axis = send, receive, axis
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=axis.group)
        return out

    @staticmethod
    def backward(ctx, gradient):
        return AllToAll.apply(gradient, ctx.receive, ctx.send, ctx.axis), None, None, None


def shift(x, axis, step):
    """Return the tensor of the rank `step` places before this one in the ring."""
    out = torch.empty_like(x)
    ops = [
        dist.P2POp(dist.isend, x.contiguous(), axis.global_rank(axis.rank + step), axis.group),
        dist.P2POp(dist.irecv, out, axis.global_rank(axis.rank - step), axis.group),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return out


class Rotate(torch.autograd.Function):
    """A step around the ring; gradients go back the other way."""

    @staticmethod
    def forward(ctx, x, axis, ps):
        ctx.axis, ctx.ps = axis, ps
        return shift(x, axis, 1)

    @staticmethod
    def backward(ctx, gradient):
        back = 1 if ctx.ps.using("plover-ring-direction") else -1  # plant: plover-ring-direction
        return shift(gradient.contiguous(), ctx.axis, back), None, None
