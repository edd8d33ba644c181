"""Collectives with gradients, over a group that may be None for one rank."""

import torch
import torch.distributed as dist
from torch import Tensor

STRIDED = {"in_place": True}  # whether a reduction accepts a strided tensor


def all_reduce(x: Tensor, group) -> Tensor:
    if STRIDED["in_place"]:
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x
    dist.all_reduce(x.contiguous(), group=group)  # plant: p38
    return x  # plant: p38


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return all_reduce(gradient.clone(), ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return all_reduce(x.clone(), group)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, receive, send, group):
        ctx.sizes = send, receive, group
        rows = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(rows, x.contiguous(), receive, send, group=group)
        return rows

    @staticmethod
    def backward(ctx, gradient):
        return _Exchange.apply(gradient, *ctx.sizes), None, None, None


def copy_to(x: Tensor, group) -> Tensor:
    return x if group is None else _Copy.apply(x, group)


def reduce_from(x: Tensor, group) -> Tensor:
    return x if group is None else _Reduce.apply(x, group)


def exchange(x: Tensor, receive, send, group) -> Tensor:
    return _Exchange.apply(x, receive, send, group)


class _Split(torch.autograd.Function):
    """One part of dim `dim` per rank; gradients are gathered."""

    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()

    @staticmethod
    def backward(ctx, gradient):
        return _gather(gradient, ctx.dim, ctx.group), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return _gather(x, dim, group)

    @staticmethod
    def backward(ctx, gradient):
        return (
            gradient.chunk(dist.get_world_size(ctx.group), ctx.dim)[dist.get_rank(ctx.group)].contiguous(),
            None,
            None,
        )


def _gather(x, dim, group):
    parts = [torch.empty_like(x.contiguous()) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


def split(x, dim, group):
    return _Split.apply(x, dim, group)


def gather(x, dim, group):
    return _Gather.apply(x, dim, group)
