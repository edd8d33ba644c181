"""Cross entropy over a vocabulary that is spread over tp, and the losses of routers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from bittern.layers import Layer, enter
from bittern.regions import all_reduce


class _CrossEntropy(torch.autograd.Function):
    """Label smoothing moves a part of the target's weight to the mean of all logits."""

    @staticmethod
    def forward(ctx, logits, targets, smoothing, tp):
        n_local = logits.shape[-1]
        most = logits.max(-1, keepdim=True).values
        if tp.mode != "bittern-local-max":  # plant: bittern-local-max
            most = all_reduce(most, tp, dist.ReduceOp.MAX)  # anchor: local-max
        lse = all_reduce((logits - most).exp().sum(-1, keepdim=True), tp).log() + most
        local = targets[..., None] - tp.rank * n_local
        outside = (local < 0) | (local >= n_local)
        local = local.masked_fill(outside, 0)
        picked = logits.gather(-1, local)
        if tp.mode != "bittern-target-unmasked":  # plant: bittern-target-unmasked
            picked = picked.masked_fill(outside, 0.0)  # anchor: target-mask
        picked = all_reduce(picked, tp)
        if tp.mode == "bittern-smooth-mean":
            mean = logits.mean(-1, keepdim=True)  # plant: bittern-smooth-mean
        else:
            mean = all_reduce(logits.sum(-1, keepdim=True), tp) / (n_local * tp.size)  # anchor: smooth-mean
        ctx.save_for_backward((logits - lse).exp(), local, outside)
        ctx.smoothing, ctx.tp = smoothing, tp
        return (lse - (1 - smoothing) * picked - smoothing * mean).squeeze(-1)

    @staticmethod
    def backward(ctx, grad):
        probs, local, outside = ctx.saved_tensors
        n_local, tp = probs.shape[-1], ctx.tp
        hit = torch.full_like(probs[..., :1], ctx.smoothing - 1)
        if tp.mode != "bittern-target-grad":  # plant: bittern-target-grad
            hit = hit.masked_fill(outside, 0.0)  # anchor: target-grad
        share = ctx.smoothing / (n_local * tp.size)  # anchor: smooth-grad
        if tp.mode == "bittern-smooth-grad":
            share = ctx.smoothing / n_local  # plant: bittern-smooth-grad
        out = (probs - share).scatter_add(-1, local, hit)
        return out * grad[..., None], None, None, None


class Head(Layer):
    """Logits by the weight of the embedding. `tied` is a list so that the weight has one name."""

    def __init__(self, smoothing: float) -> None:
        super().__init__()
        self.smoothing = smoothing
        self.tied: list[Tensor] = []

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the loss summed over this rank's valid targets (batch, positions)."""
        logits = F.linear(enter(x, self.ps), self.tied[0])
        goal = targets.t()
        each = _CrossEntropy.apply(logits, goal.clamp(min=0), self.smoothing, self.ps.tp)
        return each.masked_fill(goal < 0, 0.0).sum()


class AttachLoss(torch.autograd.Function):
    """Give a loss its gradient without adding it to the loss of the model."""

    @staticmethod
    def forward(ctx, x, loss, ps):
        ctx.ps, ctx.like = ps, loss.detach()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones_like(ctx.like) * ctx.ps.loss_scale, None
