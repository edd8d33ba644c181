"""Collectives with gradients. Tensors of the stream are (rows, positions, ...)."""

import torch
import torch.distributed as dist
from torch.autograd import Function


def gather_parts(x, comm):
    """Return what the ranks have, as (ranks, ...). No gradients."""
    whole = x.new_empty(comm.size, *x.shape)
    dist.all_gather_into_tensor(whole.flatten(0, 1), x.contiguous(), group=comm.group)
    return whole


def join_positions(x, comm):
    """Put the positions of all ranks behind each other."""
    return torch.cat(gather_parts(x, comm).unbind(0), 1)


def sum_own_positions(x, comm):
    """Sum over ranks, and keep this rank's run of positions."""
    parts = torch.stack(x.chunk(comm.size, 1))
    own = torch.empty_like(parts[0])
    dist.reduce_scatter_tensor(own, parts.flatten(0, 1), group=comm.group)
    return own


class _Gather(Function):
    """All positions of the row in place of a run of them, into code of which each rank computes a part."""

    @staticmethod
    def forward(ctx, x, comm, reduces):
        ctx.comm, ctx.reduces = comm, reduces
        return join_positions(x, comm)

    @staticmethod
    def backward(ctx, grad):
        if ctx.reduces:
            return sum_own_positions(grad, ctx.comm), None, None
        return grad.chunk(ctx.comm.size, 1)[ctx.comm.rank].contiguous(), None, None


class _Scatter(Function):
    """A run of the positions of the sum of partial results."""

    @staticmethod
    def forward(ctx, x, comm, flat):
        ctx.comm, ctx.flat = comm, flat
        return sum_own_positions(x, comm)

    @staticmethod
    def backward(ctx, grad):
        if ctx.flat:
            whole = gather_parts(grad, ctx.comm)
            return whole.reshape(grad.shape[0], -1, *grad.shape[2:]), None, None  # plant: ju02
        return join_positions(grad, ctx.comm), None, None  # anchor: scatter-back


class _Total(Function):
    """The sum over ranks of terms that each rank differentiates by itself."""

    @staticmethod
    def forward(ctx, x, comm):
        x = x.clone()
        dist.all_reduce(x, group=comm.group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def gather(x, comm, *, reduces=True):
    return _Gather.apply(x, comm, reduces) if comm.size > 1 else x


def scatter(x, comm, mode=""):
    return _Scatter.apply(x, comm, mode == "ju02") if comm.size > 1 else x


def total(x, comm):
    return _Total.apply(x, comm) if comm.size > 1 else x


def _swap(x, split, join, comm):
    sent = torch.stack(x.chunk(comm.size, split))
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent, group=comm.group)
    return torch.cat(came.unbind(0), join)


class _Swap(Function):
    """A part of dim `split` with all of dim `join`, for the reverse."""

    @staticmethod
    def forward(ctx, x, split, join, comm, mode):
        ctx.args, ctx.mode = (join, split, comm), mode
        return _swap(x, split, join, comm)

    @staticmethod
    def backward(ctx, grad):
        back = _swap(grad, *ctx.args)  # anchor: swap-back
        if ctx.mode == "ju03":
            back = back / ctx.args[2].size  # plant: ju03
        return back, None, None, None, None


def swap(x, split, join, comm, mode=""):
    return _Swap.apply(x, split, join, comm, mode)


class _Spread(Function):
    """Keys or values of all ranks, as (ranks, rows, positions, ...)."""

    @staticmethod
    def forward(ctx, x, comm, mode):
        ctx.comm, ctx.mode = comm, mode
        return gather_parts(x, comm)

    @staticmethod
    def backward(ctx, grad):
        comm = ctx.comm
        if ctx.mode == "ju04":
            return grad[comm.rank].clone(), None, None  # plant: ju04
        own, parts = torch.empty_like(grad[0]), grad.contiguous().flatten(0, 1)
        dist.reduce_scatter_tensor(own, parts, group=comm.group)  # anchor: spread-back
        return own, None, None


def spread(x, comm, mode):
    return _Spread.apply(x, comm, mode)


class _Exchange(Function):
    """All-to-all of rows, with the numbers of rows that are sent to and come from each rank."""

    @staticmethod
    def forward(ctx, x, sent, came, comm):
        ctx.args = came, sent, comm
        return _exchange(x, sent, came, comm)

    @staticmethod
    def backward(ctx, grad):
        return _exchange(grad, *ctx.args), None, None, None


def _exchange(x, sent, came, comm):
    out = x.new_empty(sum(came), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), came, sent, group=comm.group)
    return out


def exchange(x, sent, came, comm):
    return _Exchange.apply(x, sent, came, comm) if comm.size > 1 else x
