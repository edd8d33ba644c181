"""Collectives with gradients."""

import torch
import torch.distributed as dist
from torch import Tensor


def gather_list(x: Tensor, group) -> list[Tensor]:
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group=group)
    return parts


class Gather(torch.autograd.Function):
    """The parts of all ranks along a dim; each rank uses all of them, so gradients are summed."""

    @staticmethod
    def forward(ctx, x, dim, group, summed):
        ctx.dim, ctx.group, ctx.summed = dim, group, summed
        return torch.cat(gather_list(x, group), dim)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        if ctx.summed:
            gradient = gradient.clone()
            dist.all_reduce(gradient, group=ctx.group)
        parts = gradient.chunk(dist.get_world_size(ctx.group), ctx.dim)  # plant: veomni-681
        return parts[dist.get_rank(ctx.group)].contiguous(), None, None, None


class Exchange(torch.autograd.Function):
    """An all-to-all of rows."""

    @staticmethod
    def forward(ctx, x, receive, send, group):
        ctx.sizes = send, receive, group
        rows = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(rows, x.contiguous(), receive, send, group=group)
        return rows

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient, *ctx.sizes), None, None, None


class Swap(torch.autograd.Function):
    """An all-to-all of equal parts: dim `cut` is split over the ranks, dim `joined` is concatenated."""

    @staticmethod
    def forward(ctx, x, cut, joined, group):
        ctx.dims = joined, cut, group
        ranks = dist.get_world_size(group)
        sent = torch.stack([part.contiguous() for part in x.chunk(ranks, cut)])
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=group)
        return torch.cat(list(got), joined)

    @staticmethod
    def backward(ctx, gradient):
        return Swap.apply(gradient, *ctx.dims), None, None, None


class Copy(torch.autograd.Function):
    """Identity on all ranks; gradients are summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Sum(torch.autograd.Function):
    """The sum over ranks; each part gets its gradient unchanged."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None
