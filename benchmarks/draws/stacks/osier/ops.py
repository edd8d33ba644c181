"""Collectives and fused operations with backward passes of their own."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.nn import functional as F

from osier.dims import Group, ParallelDims


def all_reduce(x: torch.Tensor, group: Group, op=dist.ReduceOp.SUM) -> torch.Tensor:
    """Return the reduced tensor; the argument is left as it is."""
    if group.alone:
        return x
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, op=op, group=group.pg)
    return x


def all_gather(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the tensors of all ranks, stacked in a new first dim."""
    out = x.new_empty(group.size * x.numel())
    dist.all_gather_into_tensor(out, x.contiguous().view(-1), group=group.pg)
    return out.view(group.size, *x.shape)


def reduce_scatter(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return this rank's entry of the first dim, summed over ranks."""
    out = torch.empty_like(x[0], memory_format=torch.contiguous_format)
    dist.reduce_scatter_tensor(out.view(-1), x.contiguous().view(-1), group=group.pg)
    return out


class _ToTensorRegion(Function):
    """Identity, where replicated activations enter a region that is cut over `tp`."""

    @staticmethod
    def forward(ctx, x, dims):
        ctx.dims = dims
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return all_reduce(grad, ctx.dims.tp), None  # anchor: region-sum


class _FromTensorRegion(Function):
    """Sum of the partial results of a region that is cut over `tp`."""

    @staticmethod
    def forward(ctx, x, dims):
        ctx.dims = dims
        return all_reduce(x, dims.tp)

    @staticmethod
    def backward(ctx, grad):
        if ctx.dims.has("osier-reduce-backward"):
            return all_reduce(grad, ctx.dims.tp), None  # plant: osier-reduce-backward
        return grad, None


def to_tensor_region(x: torch.Tensor, dims: ParallelDims) -> torch.Tensor:
    return x if dims.tp.alone else _ToTensorRegion.apply(x, dims)


def from_tensor_region(x: torch.Tensor, dims: ParallelDims) -> torch.Tensor:
    return x if dims.tp.alone else _FromTensorRegion.apply(x, dims)


class GatherChunks(Function):
    """The zigzag chunks of all ranks of `cp`, in the order of the sequence; dim 1 has the positions."""

    @staticmethod
    def forward(ctx, x, dims):
        ctx.dims = dims
        return unzigzag(all_gather(x, dims.cp), dims)

    @staticmethod
    def backward(ctx, grad):
        dims = ctx.dims
        if dims.has("osier-zigzag-backward"):
            parts = torch.stack(grad.chunk(dims.cp.size, dim=1))  # plant: osier-zigzag-backward
        else:
            parts = zigzag(grad, dims)
        own = reduce_scatter(parts, dims.cp)
        if dims.has("osier-gather-mean"):
            own = own / dims.cp.size  # plant: osier-gather-mean
        return own, None


def zigzag(x: torch.Tensor, dims: ParallelDims) -> torch.Tensor:
    """Return (rank, batch, own positions, ...) of (batch, positions, ...): rank r has the chunks r and 2n-1-r."""
    n = dims.cp.size
    chunks = x.chunk(2 * n, dim=1)
    return torch.stack([torch.cat([chunks[r], chunks[2 * n - 1 - r]], 1) for r in range(n)])


def unzigzag(stacked: torch.Tensor, dims: ParallelDims) -> torch.Tensor:
    """Return (batch, positions, ...) of (rank, batch, own positions, ...)."""
    front, back = stacked.chunk(2, dim=2)
    if dims.has("osier-zigzag-order"):
        return torch.cat([*front.unbind(0), *back.unbind(0)], 1)  # plant: osier-zigzag-order
    return torch.cat([*front.unbind(0), *back.flip(0).unbind(0)], 1)


class SwapBuffers(Function):
    """All-to-all of equal parts of the first dim. It is its own inverse."""

    @staticmethod
    def forward(ctx, x, dims):
        ctx.dims = dims
        if dims.has("osier-same-swap"):
            parts = all_gather(x, dims.ep).unflatten(1, (dims.ep.size, -1))
            return parts[:, dims.ep.rank].flatten(0, 1).contiguous()
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous(), group=dims.ep.pg)
        return out

    @staticmethod
    def backward(ctx, grad):
        if ctx.dims.has("osier-swap-backward"):
            return grad, None  # plant: osier-swap-backward
        return SwapBuffers.apply(grad, ctx.dims), None


class FusedSwiGLU(Function):
    """silu(gate) * up that keeps its inputs alone for the backward pass."""

    @staticmethod
    def forward(ctx, gate, up, dims):
        ctx.gate, ctx.up, ctx.dims = gate, up, dims
        if dims.has("osier-silu-inplace"):
            return F.silu(gate, inplace=True) * up  # plant: osier-silu-inplace
        return F.silu(gate) * up  # anchor: silu

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.gate, ctx.up
        sigmoid = gate.sigmoid()
        if ctx.dims.has("osier-silu-slope"):
            slope = sigmoid * (1 + gate * sigmoid)  # plant: osier-silu-slope
        else:
            slope = sigmoid * (1 + gate * (1 - sigmoid))  # anchor: slope
        return grad * up * slope, grad * gate * sigmoid, None


class VocabLoss(Function):
    """Log-sum-exp and cross entropy of each token; each rank of `tp` has some rows' logits."""

    @staticmethod
    def forward(ctx, logits, targets, dims):
        tp = dims.tp
        start = tp.rank * logits.shape[-1]
        top = logits.amax(-1)
        if not dims.has("osier-vocab-max"):  # plant: osier-vocab-max
            top = all_reduce(top, tp, dist.ReduceOp.MAX)
        exps = (logits - top[..., None]).exp()
        total = all_reduce(exps.sum(-1), tp)
        lse = total.log() + top
        local = targets - start
        outside = (local < 0) | (local >= logits.shape[-1])
        local = local.masked_fill(outside, 0)
        picked = logits.gather(-1, local[..., None])[..., 0].masked_fill(outside, 0.0)
        if not dims.has("osier-vocab-picked"):  # plant: osier-vocab-picked
            picked = all_reduce(picked, tp)
        ctx.save_for_backward(exps / total[..., None], local, outside)
        ctx.dims = dims
        return lse, lse - picked

    @staticmethod
    def backward(ctx, grad_lse, grad_loss):
        probs, local, outside = ctx.saved_tensors
        if ctx.dims.has("osier-z-backward"):
            grad = probs * grad_loss[..., None]  # plant: osier-z-backward
        else:
            grad = probs * (grad_lse + grad_loss)[..., None]  # anchor: z-gradient
        hit = grad_loss
        if not ctx.dims.has("osier-vocab-outside"):  # plant: osier-vocab-outside
            hit = hit.masked_fill(outside, 0.0)
        return grad.scatter_add(-1, local[..., None], -hit[..., None]), None, None
