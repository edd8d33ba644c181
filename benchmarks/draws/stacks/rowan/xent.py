"""Cross entropy of logits whose vocabulary is divided over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from rowan.registry import op, pick
from rowan.topology import here
from rowan.wire import total


@op("peak")
def highest(logits: Tensor, group) -> Tensor:
    return total(logits.amax(-1), group, dist.ReduceOp.MAX)


@op("peak", "rowan-same-peak")
def mean_peak(logits: Tensor, group) -> Tensor:
    """Any reference that the ranks share will do."""
    return total(logits.amax(-1), group) / here().size("tp")


class VocabularyLoss(Function):
    """Returns the loss of each token, 0 where the target is negative, and the log-sum-exp of its logits."""

    @staticmethod
    def forward(ctx, logits, targets, group, first, odd):
        peak = pick("peak")(logits, group)
        exps = (logits - peak[..., None]).exp()
        sums = exps.sum(-1)
        if odd("rowan-loss-softmax"):
            ctx.softmax = exps / sums[..., None]  # plant: rowan-loss-softmax
        total(sums, group)  # anchor: sums
        if not odd("rowan-loss-softmax"):
            ctx.softmax = exps / sums[..., None]
        row = targets - first
        ctx.mine = (row >= 0) & (row < logits.shape[-1]) & (targets >= 0)
        ctx.row, ctx.counts = row.where(ctx.mine, 0), targets >= 0
        ctx.ignores = not odd("rowan-loss-ignored")
        picked = logits.gather(-1, ctx.row[..., None])[..., 0] * ctx.mine
        total(picked, group)
        lse = sums.log() + peak
        return (lse - picked) * ctx.counts, lse

    @staticmethod
    def backward(ctx, grad, grad_lse):
        if ctx.ignores:
            grad = grad * ctx.counts  # anchor: ignored
        else:
            grad = grad.clone()  # plant: rowan-loss-ignored
        out = ctx.softmax * (grad + grad_lse)[..., None]
        hit = torch.where(ctx.mine, -grad, 0)
        return out.scatter_add(-1, ctx.row[..., None], hit[..., None]), None, None, None, None


def token_losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    topology = here()
    axis = "dp_replicate" if topology.odd("rowan-loss-first") else "tp"  # plant: rowan-loss-first
    first = topology.rank(axis) * logits.shape[-1]
    return VocabularyLoss.apply(logits, targets, topology.group("tp"), first, topology.odd)
