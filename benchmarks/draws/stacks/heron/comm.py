"""Collectives with gradients, over a torch process group."""

import torch
import torch.distributed as dist

from heron.switch import using


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


class Reduce(torch.autograd.Function):
    """The sum over ranks; each part gets its gradient unchanged."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        if using("xtuner-1004"):
            gradient = gradient.contiguous().clone()
            dist.all_reduce(gradient, group=ctx.group)  # plant: xtuner-1004
        return gradient, None


class SumAll(torch.autograd.Function):
    """The sum over ranks that use it differently: gradients are summed too."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Exchange(torch.autograd.Function):
    """An all-to-all of rows."""

    @staticmethod
    def forward(ctx, x, receive, send, group):
        ctx.sizes = send, receive, group
        rows = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(rows, x.contiguous(), receive, send, group=group)
        ctx.save_for_backward(x)
        return rows

    @staticmethod
    def backward(ctx, gradient):
        if using("mori-675"):
            send, receive, group = ctx.sizes
            (x,) = ctx.saved_tensors
            return x.clone(), None, None, None  # plant: mori-675
        return Exchange.apply(gradient, *ctx.sizes), None, None, None


class GatherTokens(torch.autograd.Function):
    """The sequence parts (dim 1) of all ranks; all ranks have the same gradient, and each takes its part."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x.contiguous()) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        if using("e01"):
            flat = torch.cat([part.flatten(0, 1) for part in parts])
            return flat.view(len(x), -1, x.shape[-1])  # plant: e01
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, gradient):
        parts = gradient.chunk(dist.get_world_size(ctx.group), 1)
        if using("paddle-38744"):
            return parts[0].contiguous(), None  # plant: paddle-38744
        return parts[dist.get_rank(ctx.group)].contiguous(), None


class SplitTokens(torch.autograd.Function):
    """The rank's part of the sequence; gradients are gathered."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous()

    @staticmethod
    def backward(ctx, gradient):
        parts = [torch.empty_like(gradient.contiguous()) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, gradient.contiguous(), group=ctx.group)
        return torch.cat(parts, 1), None
