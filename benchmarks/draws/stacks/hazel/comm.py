"""Collectives with gradients. A group of None is this rank alone."""

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.distributed.tensor import DTensor


def local(x):
    return x.to_local() if isinstance(x, DTensor) else x


def all_reduce(x, group, op=dist.ReduceOp.SUM):
    """Reduce in place."""
    if group is not None:
        dist.all_reduce(x, op, group=group)
    return x


class _CopyTo(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return all_reduce(grad.clone(), ctx.group), None


class _ReduceFrom(Function):
    @staticmethod
    def forward(ctx, x, group):
        return all_reduce(x.clone(), group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _SumOver(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_reduce(x.clone(), group)

    @staticmethod
    def backward(ctx, grad):
        return all_reduce(grad.clone(), ctx.group), None


def copy_to(x, group):
    """Enter a region in which the ranks hold parts of the weights."""
    return x if group is None else _CopyTo.apply(x, group)


def reduce_from(x, group):
    """Leave such a region: add the ranks' parts."""
    return x if group is None else _ReduceFrom.apply(x, group)


def sum_over(x, group):
    """Add tensors of ranks that then compute different things with the sum."""
    return x if group is None else _SumOver.apply(x, group)


def gather(x, group, dim):
    """Return the ranks' tensors behind each other, without gradients."""
    if group is None:
        return x
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


class _GatherKV(Function):
    """Keys and values of all ranks of `cp`, along dim 2. Both gathers are in flight together."""

    @staticmethod
    def forward(ctx, k, v, pc):
        ctx.pc, group = pc, pc.group("cp")
        parts = [[torch.empty_like(x) for _ in range(pc.size("cp"))] for x in (k, v)]
        works = [
            dist.all_gather(part, x.contiguous(), group=group, async_op=True)
            for part, x in zip(parts, (k, v))
        ]
        if pc.on("hazel-kv-async"):
            works = works[:1]  # plant: hazel-kv-async
        for work in works:
            work.wait()  # anchor: kv-wait
        return tuple(torch.cat(part, 2) for part in parts)

    @staticmethod
    def backward(ctx, dk, dv):
        pc, group = ctx.pc, ctx.pc.group("cp")
        dk = all_reduce(dk.contiguous(), group)
        if not pc.on("hazel-dv-own"):  # plant: hazel-dv-own
            dv = all_reduce(dv.contiguous(), group)  # anchor: dv-sum
        own = [x.chunk(pc.size("cp"), 2)[pc.rank("cp")] for x in (dk, dv)]
        return *own, None


def gather_kv(k, v, pc):
    return (k, v) if pc.group("cp") is None else _GatherKV.apply(k, v, pc)


class _AllToAll(Function):
    @staticmethod
    def forward(ctx, x, receive, send, group):
        ctx.sizes = receive, send, group
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        receive, send, group = ctx.sizes
        out = grad.new_empty(sum(send), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), send, receive, group=group)
        return out, None, None, None


def all_to_all(x, receive, send, group):
    """Send rows to the ranks in order, `send[r]` to rank r, and return those received."""
    return x if group is None else _AllToAll.apply(x, receive, send, group)
