"""Collectives with their backward passes. Activations are (sequence, batch, ...), so all of them use dim 0."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from bittern.parallel_state import Group


def all_reduce(x: Tensor, group: Group, op=dist.ReduceOp.SUM) -> Tensor:
    """Return the reduced tensor; the argument stays as it is."""
    if group.size == 1:
        return x
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, op=op, group=group.pg)
    return x


def all_gather(x: Tensor, group: Group) -> Tensor:
    if group.size == 1:
        return x
    out = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
    dist.all_gather_into_tensor(out, x.contiguous(), group=group.pg)
    return out


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    if group.size == 1:
        return x
    out = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group.pg)
    return out


def own_chunk(x: Tensor, group: Group) -> Tensor:
    return x.chunk(group.size, 0)[group.rank].contiguous()


def exchange(x: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
    if group.size == 1:
        return x
    out = x.new_empty((sum(receive), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=group.pg)
    return out


class _Copy(torch.autograd.Function):
    """Identity; ranks compute parts of the gradient."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if ctx.group.mode == "bittern-copy-grad":
            return grad, None  # plant: bittern-copy-grad
        return all_reduce(grad, ctx.group), None  # anchor: copy-grad


class _Reduce(torch.autograd.Function):
    """Sum over ranks, after which all of them compute the same."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx, grad):
        if ctx.group.mode == "bittern-reduce-grad":
            return all_reduce(grad, ctx.group), None  # plant: bittern-reduce-grad
        return grad, None  # anchor: reduce-grad


class _SumEach(torch.autograd.Function):
    """Sum over ranks, each of which uses the sum for something else."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx, grad):
        return all_reduce(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    """Gather chunks; each rank computes a part of the gradient of all of them."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx, grad):
        if ctx.group.mode == "bittern-gather-grad":
            return own_chunk(grad, ctx.group), None  # plant: bittern-gather-grad
        return reduce_scatter(grad, ctx.group), None  # anchor: gather-grad


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx, grad):
        whole = all_gather(grad, ctx.group)  # anchor: scatter-grad
        if ctx.group.mode == "bittern-scatter-grad-scale":
            whole = whole / ctx.group.size  # plant: bittern-scatter-grad-scale
        return whole, None


class _Split(torch.autograd.Function):
    """Keep the own chunk of what all ranks have."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.shape = group, x.shape
        return own_chunk(x, group)

    @staticmethod
    def backward(ctx, grad):
        if ctx.group.mode == "bittern-split-grad":
            whole = grad.new_zeros(ctx.shape)  # plant: bittern-split-grad
            own_start = ctx.group.rank * len(grad)
            whole[own_start : own_start + len(grad)] = grad  # plant: bittern-split-grad
            return whole, None  # plant: bittern-split-grad
        return all_gather(grad, ctx.group), None  # anchor: split-grad


class _Join(torch.autograd.Function):
    """Gather chunks; all ranks compute the same with them."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        if group.mode == "bittern-join-order":
            parts = list(all_gather(x, group).chunk(group.size))
            turned = parts[group.rank :] + parts[: group.rank]  # plant: bittern-join-order
            return torch.cat(turned)
        return all_gather(x, group)  # anchor: join

    @staticmethod
    def backward(ctx, grad):
        if ctx.group.mode == "bittern-join-grad":
            return reduce_scatter(grad, ctx.group), None  # plant: bittern-join-grad
        return own_chunk(grad, ctx.group), None  # anchor: join-grad


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, receive, group):
        ctx.args = (receive, send, group)
        return exchange(x, send, receive, group)

    @staticmethod
    def backward(ctx, grad):
        if ctx.args[-1].mode == "bittern-exchange-half":
            half = exchange(grad.float(), *ctx.args)  # plant: bittern-exchange-half
            return half.to(grad.dtype), None, None, None
        return exchange(grad, *ctx.args), None, None, None  # anchor: exchange-grad


def apply(function, x: Tensor, group: Group) -> Tensor:
    return x if group.size == 1 else function.apply(x, group)


def copy_to(x, group):
    return apply(_Copy, x, group)


def reduce_from(x, group):
    return apply(_Reduce, x, group)


def sum_each(x, group):
    return apply(_SumEach, x, group)


def gather_from(x, group):
    return apply(_Gather, x, group)


def reduce_scatter_to(x, group):
    return apply(_ReduceScatter, x, group)


def split_to(x, group):
    return apply(_Split, x, group)


def join_from(x, group):
    return apply(_Join, x, group)


def all_to_all(x, send, receive, group):
    return x if group.size == 1 else _AllToAll.apply(x, send, receive, group)
