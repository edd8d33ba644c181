"""Collectives, alone and within autograd. Without a group they return what they get."""

import torch
import torch.distributed as dist
from torch.autograd import Function


def reduce_(x, group, op=dist.ReduceOp.SUM):
    """Reduce a tensor in place, and return it."""
    if group is not None:
        dist.all_reduce(x, op, group=group)
    return x


def gather_plain(x, group, dim=0):
    """Concatenate the tensors of all ranks along a dim."""
    if group is None:
        return x
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


def scatter_sum(x, group, dim):
    """Add up the tensors of all ranks, and return this rank's chunk along a dim."""
    if group is None:
        return x
    front = x.movedim(dim, 0).contiguous()
    out = front.new_empty(front.shape[0] // group.size(), *front.shape[1:])
    dist.reduce_scatter_tensor(out, front, group=group)
    return out.movedim(0, dim)


class _GatherSum(Function):
    """All-gather whose users hold different gradients: the backward pass adds them."""

    @staticmethod
    def forward(ctx, x, group, dim):
        ctx.args = group, dim
        return gather_plain(x, group, dim)

    @staticmethod
    def backward(ctx, grad):
        group, dim = ctx.args
        return scatter_sum(grad, group, dim).contiguous(), None, None


class _GatherSame(Function):
    """All-gather whose users hold the same gradient: the backward pass takes its chunk."""

    @staticmethod
    def forward(ctx, x, group, dim):
        ctx.args = group, dim
        return gather_plain(x, group, dim)

    @staticmethod
    def backward(ctx, grad):
        group, dim = ctx.args
        return grad.chunk(group.size(), dim)[group.rank()].contiguous(), None, None


class _ScatterSum(Function):
    @staticmethod
    def forward(ctx, x, group, dim):
        ctx.args = group, dim
        return scatter_sum(x, group, dim).contiguous()

    @staticmethod
    def backward(ctx, grad):
        return gather_plain(grad, *ctx.args), None, None


class _Total(Function):
    """Sum over ranks that all go on with it in the same way."""

    @staticmethod
    def forward(ctx, x, group):
        return reduce_(x.clone(), group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Copied(Function):
    """Identity to where ranks do different things: the backward pass adds gradients."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return reduce_(grad.clone(), ctx.group), None


def gather(x, group, dim, *, same=False):
    if group is None:
        return x
    return (_GatherSame if same else _GatherSum).apply(x, group, dim)


def scatter(x, group, dim):
    return x if group is None else _ScatterSum.apply(x, group, dim)


def total(x, group):
    return x if group is None else _Total.apply(x, group)


def copied(x, group):
    return x if group is None else _Copied.apply(x, group)


def _exchange(x, group):
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def _to_heads(x, group):
    """From (rows, positions / n, heads, ...) to (rows, positions, heads / n, ...)."""
    parts = _exchange(torch.stack(x.chunk(group.size(), 2)), group)
    return torch.cat(parts.unbind(0), 1)


def _to_positions(x, group):
    parts = _exchange(torch.stack(x.chunk(group.size(), 1)), group)
    return torch.cat(parts.unbind(0), 2)


class _ToHeads(Function):
    @staticmethod
    def forward(ctx, x, grid):
        ctx.grid = grid
        return _to_heads(x, grid.group("cp"))

    @staticmethod
    def backward(ctx, grad):
        grid, group = ctx.grid, ctx.grid.group("cp")
        if grid.has("sorrel-heads-back"):
            parts = _exchange(torch.stack(grad.chunk(group.size(), 1)), group)
            return torch.stack(parts.unbind(0), 3).flatten(2, 3), None  # plant: sorrel-heads-back
        return _to_positions(grad, group), None  # anchor: heads-back


class _ToPositions(Function):
    @staticmethod
    def forward(ctx, x, grid):
        ctx.grid = grid
        return _to_positions(x, grid.group("cp"))

    @staticmethod
    def backward(ctx, grad):
        return _to_heads(grad.contiguous(), ctx.grid.group("cp")), None


def to_heads(x, grid):
    """Enter attention over whole rows, with a part of the heads."""
    if grid.group("cp") is None:
        return x
    if grid.has("sorrel-same-slice"):
        whole = gather(x, grid.group("cp"), 1)
        return whole.chunk(grid.size("cp"), 2)[grid.rank("cp")]
    return _ToHeads.apply(x, grid)


def to_positions(x, grid):
    return x if grid.group("cp") is None else _ToPositions.apply(x, grid)


class _Rows(Function):
    @staticmethod
    def forward(ctx, x, got, sent, group):
        ctx.args = got, sent, group
        out = x.new_empty(sum(got), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), got, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        got, sent, group = ctx.args
        out = grad.new_empty(sum(sent), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), sent, got, group=group)
        return out, None, None, None


def exchange_rows(x, got, sent, group):
    """Send `sent[r]` rows to rank r, in order. Rank r sends `got[r]` rows."""
    return x if group is None else _Rows.apply(x, got, sent, group)
