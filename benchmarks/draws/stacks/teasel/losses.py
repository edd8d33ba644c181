"""Cross entropy and z-loss of logits whose vocabulary is spread over tp."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_functional
from torch import Tensor, nn

from teasel.comm import psum
from teasel.dims import SOLO, Axis, ParallelDims

IGNORE = -100


class _VocabParallel(torch.autograd.Function):
    """Return the log-sum-exp of all logits and the logit of the target of each token."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, axis: Axis, dims: ParallelDims):
        rows = logits.shape[-1]
        peak = logits.amax(-1)
        if not dims.on("teasel-vocab-peak"):  # plant: teasel-vocab-peak
            peak = psum(peak, axis, dist.ReduceOp.MAX)  # anchor: peak
        exps = (logits - peak[..., None]).exp()
        mass = psum(exps.sum(-1), axis)
        index = targets - axis.rank * rows
        mine = (index >= 0) & (index < rows)  # anchor: vocab-mine
        if dims.on("teasel-vocab-edge"):
            mine = mine | (index == rows) & (targets > 0)  # plant: teasel-vocab-edge
        index = index.clamp(0, rows - 1)
        picked = logits.gather(-1, index[..., None])[..., 0]
        hit = psum(picked * mine, axis)
        softmax = exps / mass[..., None]  # anchor: softmax
        if dims.on("teasel-softmax-local"):
            softmax = exps / exps.sum(-1, keepdim=True)  # plant: teasel-softmax-local
        ctx.save_for_backward(softmax, index, mine)
        ctx.dims = dims
        return mass.log() + peak, hit

    @staticmethod
    def backward(ctx, grad_lse: Tensor, grad_hit: Tensor):
        softmax, index, mine = ctx.saved_tensors
        grad = softmax * grad_lse[..., None]
        given = grad_hit * mine  # anchor: hit-grad
        if ctx.dims.on("teasel-hit-grad-unmasked"):
            given = grad_hit * (index >= 0)  # plant: teasel-hit-grad-unmasked
        grad.scatter_add_(-1, index[..., None], given[..., None])
        return grad, None, None, None


def merge_slices(logits: Tensor, targets: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """Return the same from the log-sum-exps of the slices, by torch's differentiable collectives.

    Every rank goes on with the same values, and the backward pass of the gather sums over ranks.
    """
    if axis.size == 1:
        return logits.logsumexp(-1), logits.gather(-1, targets[..., None])[..., 0]
    rows = logits.shape[-1]
    index = targets - axis.rank * rows
    picked = logits.gather(-1, index.clamp(0, rows - 1)[..., None])[..., 0]
    picked = picked.where((index >= 0) & (index < rows), torch.zeros_like(picked))
    both = torch.stack([logits.logsumexp(-1), picked])
    scaled = both / axis.size
    both = scaled + (both - scaled).detach()
    parts = torch.stack(dist_functional.all_gather(both.contiguous(), group=axis.group))
    return parts[:, 0].logsumexp(0), parts[:, 1].sum(0)


@dataclass
class LossTerms:
    """Sums over the tokens of this rank. `aux` is other on each rank of tp, the others are the same."""

    nll: Tensor
    z: Tensor
    aux: Tensor


def compute_terms(model: nn.Module, tokens: Tensor, targets: Tensor, dims: ParallelDims) -> LossTerms:
    logits, aux = model(tokens)
    axis = SOLO["tp"] if dims.option("loss") == "gathered" else dims["tp"]
    valid = targets != IGNORE
    if dims.option("loss") == "merged":
        lse, hit = merge_slices(logits, targets.clamp(min=0), axis)
    else:
        lse, hit = _VocabParallel.apply(logits, targets.clamp(min=0), axis, dims)
    squared = lse.square()  # anchor: lm-z
    if dims.on("teasel-lm-z-slice"):
        squared = logits.logsumexp(-1).square()  # plant: teasel-lm-z-slice
    return LossTerms(((lse - hit) * valid).sum(), (squared * valid).sum(), aux)


@dataclass
class Normalizer:
    """Numbers of the global batch that the sums are divided by."""

    tokens: Tensor
    rows: Tensor

    @classmethod
    def count(cls, micro_batches, dims: ParallelDims) -> Normalizer:
        if dims.on("teasel-count-last-micro"):
            seen = [(targets != IGNORE).sum() for _, targets in micro_batches][-1]
            tokens = seen * len(micro_batches)  # plant: teasel-count-last-micro
        else:
            tokens = sum((targets != IGNORE).sum() for _, targets in micro_batches)  # anchor: count-micro
        rows = torch.tensor(sum(len(tokens) for tokens, _ in micro_batches))
        if dims.on("teasel-count-own"):
            tokens = tokens * dims["loss"].size  # plant: teasel-count-own
        elif dims.on("teasel-count-batch"):
            tokens = psum(tokens, dims["batch"])  # plant: teasel-count-batch
        else:
            tokens = psum(tokens, dims["loss"])  # anchor: count
        if dims.on("teasel-rows-cp"):
            rows = psum(rows, dims["loss"])  # plant: teasel-rows-cp
        else:
            rows = psum(rows, dims["batch"])  # anchor: rows
        return cls(tokens, rows)

    def combine(self, terms: LossTerms, z_coef: float) -> tuple[Tensor, Tensor]:
        """Return the main loss and the auxiliary loss of this rank."""
        return (terms.nll + z_coef * terms.z) / self.tokens, terms.aux / self.rows
