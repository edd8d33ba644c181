"""Collectives, with and without gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.tensor import DTensor, Partial, Replicate

from teasel.dims import Axis, ParallelDims


def psum(x: Tensor, axis: Axis, op=dist.ReduceOp.SUM) -> Tensor:
    """Return the reduction of `x` over an axis; no gradient flows through it."""
    x = x.detach().clone(memory_format=torch.contiguous_format)
    if axis.size > 1:
        dist.all_reduce(x, op=op, group=axis.group)
    return x


def stack_ranks(x: Tensor, axis: Axis) -> Tensor:
    """Return the tensors of all ranks along a new dim 0; no gradient flows through it."""
    if axis.size == 1:
        return x.detach()[None]
    out = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x.detach().contiguous(), group=axis.group)
    return out.unflatten(0, (axis.size, -1))


class _GatherSequence(torch.autograd.Function):
    """Concatenate the chunks of all ranks along dim 1. Each rank uses the result in its own way."""

    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis, dims: ParallelDims) -> Tensor:
        ctx.axis, ctx.dims = axis, dims
        return torch.cat(list(stack_ranks(x, axis)), dim=1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        axis, dims = ctx.axis, ctx.dims
        chunk = grad.shape[1] // axis.size
        if dims.on("teasel-kv-grad-slice"):
            mine = grad.narrow(1, axis.rank * chunk, chunk)  # plant: teasel-kv-grad-slice
            return mine.contiguous(), None, None
        total = psum(grad, axis)  # anchor: kv-grad
        if dims.on("teasel-kv-grad-mean"):
            total /= axis.size  # plant: teasel-kv-grad-mean
        return total.narrow(1, axis.rank * chunk, chunk).contiguous(), None, None


def gather_sequence(x: Tensor, axis: Axis, dims: ParallelDims) -> Tensor:
    return _GatherSequence.apply(x, axis, dims)


class _ScatterSum(torch.autograd.Function):
    """Sum partial results over an axis and keep this rank's chunk along dim 1."""

    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis, dims: ParallelDims) -> Tensor:
        ctx.axis, ctx.dims = axis, dims
        if axis.size == 1:
            return x.clone()
        chunks = torch.cat(x.chunk(axis.size, dim=1))
        out = x.new_empty(x.shape[0], x.shape[1] // axis.size, *x.shape[2:])
        dist.reduce_scatter_tensor(out, chunks, group=axis.group)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        axis = ctx.axis
        if ctx.dims.on("teasel-scatter-grad"):
            grad = grad / axis.size  # plant: teasel-scatter-grad
        return (torch.cat(list(stack_ranks(grad, axis)), dim=1), None, None)  # anchor: scatter-grad


def scatter_sum(x: Tensor, axis: Axis, dims: ParallelDims) -> Tensor:
    return _ScatterSum.apply(x, axis, dims)


def exchange(x: Tensor, recv: list[int], send: list[int], axis: Axis) -> Tensor:
    """All-to-all of rows, of which `send[r]` go to rank r and `recv[r]` come from it."""
    if axis.size == 1:
        return x.clone()
    out = x.new_empty(sum(recv), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), recv, send, group=axis.group)
    return out


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, recv: list[int], send: list[int], axis: Axis, dims: ParallelDims) -> Tensor:
        ctx.args = recv, send, axis, dims
        if axis.size == 1:
            return x.clone()
        if dims.on("teasel-a2a-float32"):
            return exchange(x.float(), recv, send, axis).to(x.dtype)  # plant: teasel-a2a-float32
        return exchange(x, recv, send, axis)  # anchor: a2a-forward

    @staticmethod
    def backward(ctx, grad: Tensor):
        recv, send, axis, dims = ctx.args
        if axis.size == 1:
            return grad.clone(), None, None, None, None
        if dims.on("teasel-a2a-grad-bfloat16"):
            grad = grad.bfloat16().to(grad.dtype)  # plant: teasel-a2a-grad-bfloat16
        return (exchange(grad, send, recv, axis), None, None, None, None)  # anchor: a2a-backward


def all_to_all(x: Tensor, recv: list[int], send: list[int], axis: Axis, dims: ParallelDims) -> Tensor:
    if dims.option("dispatch") == "functional" and axis.size > 1:
        return all_to_all_single_autograd(x, recv, send, axis.group)
    return _AllToAll.apply(x, recv, send, axis, dims)


class _Rotate(torch.autograd.Function):
    """Pass a tensor to the next rank of a ring, and get that of the previous one."""

    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis, dims: ParallelDims, shift: int) -> Tensor:
        ctx.args = axis, dims, shift
        return _pass_on(x, axis, shift)

    @staticmethod
    def backward(ctx, grad: Tensor):
        axis, dims, shift = ctx.args
        if dims.on("teasel-ring-grad-direction"):
            return (_pass_on(grad, axis, shift), None, None, None)  # plant: teasel-ring-grad-direction
        return _pass_on(grad, axis, -shift), None, None, None  # anchor: ring-grad


def rotate(x: Tensor, axis: Axis, dims: ParallelDims, shift: int = 1) -> Tensor:
    return _Rotate.apply(x, axis, dims, shift)


def _pass_on(x: Tensor, axis: Axis, shift: int) -> Tensor:
    x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    to, source = (axis.rank + shift) % axis.size, (axis.rank - shift) % axis.size
    ops = [
        dist.P2POp(dist.isend, x, group=axis.group, group_peer=to),
        dist.P2POp(dist.irecv, out, group=axis.group, group_peer=source),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return out


def local(weight: Tensor, *, partial: bool = True) -> Tensor:
    """Return this rank's part of a weight.

    With `partial` the ranks that hold copies use them for different tokens, so that the gradient of the
    weight is the sum of theirs.
    """
    if not isinstance(weight, DTensor):
        return weight
    placements = [
        Partial() if partial and isinstance(placement, Replicate) else placement
        for placement in weight.placements
    ]
    return weight.to_local(grad_placements=placements)


def local_part(x: Tensor) -> Tensor:
    """Return the storage of this rank, for writing."""
    return x._local_tensor if isinstance(x, DTensor) else x
