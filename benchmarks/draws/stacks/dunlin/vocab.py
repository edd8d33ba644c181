"""The embedding, which is the head too, with rows of the vocabulary on each rank of tp."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from dunlin.config import Config
from dunlin.topo import Part
from dunlin.wire import all_sum, close_region, open_region


class CrossEntropy(Function):
    """Cross entropy plus the z loss for logits (tokens, part of the vocabulary)."""

    @staticmethod
    def forward(ctx, logits, targets, z, topo):
        n = logits.shape[-1]
        top = all_sum(logits.amax(-1), topo.tp, dist.ReduceOp.MAX)  # anchor: top
        if topo.trial("top-local"):
            top = logits.amax(-1)  # plant: top-local
        powers = (logits - top[:, None]).exp()
        total = all_sum(powers.sum(-1), topo.tp)  # anchor: total
        log_total = total.log() + top
        local = targets - topo.tp.index * n
        own = (local >= 0) & (local < n)
        local = local.masked_fill(~own, 0)
        picked = all_sum(logits.gather(1, local[:, None])[:, 0] * own, topo.tp)
        ctx.save_for_backward(powers / total[:, None], log_total, local, own)
        ctx.z, ctx.topo = z, topo
        return log_total - picked + z * log_total.square()

    @staticmethod
    def backward(ctx, grad):
        probs, log_total, local, own = ctx.saved_tensors
        if ctx.topo.mode == "probs-local":
            probs = probs / probs.sum(-1, keepdim=True)  # plant: probs-local
        slope = 1 + 2 * ctx.z * log_total[:, None]  # anchor: z-slope
        if ctx.topo.mode == "z-slope":
            slope = 1 + 2 * ctx.z * log_total[:, None] / ctx.topo.tp.size  # plant: z-slope
        back = probs * slope
        minus = -own.to(back.dtype)  # anchor: target-own
        if ctx.topo.mode == "target-everywhere":
            minus = -torch.ones_like(log_total)  # plant: target-everywhere
        back.scatter_add_(1, local[:, None], minus[:, None])
        return back * grad[:, None], None, None, None


class TiedEmbedding(Part):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.z = config.losses.z
        self.weight = nn.Parameter(torch.empty(config.vocab, config.width))

    def forward(self, tokens: Tensor) -> Tensor:
        topo, n = self.topo, len(self.weight)
        local = tokens - topo.tp.index * n
        own = (local >= 0) & (local < n)  # anchor: vocab-edge
        if topo.mode == "vocab-edge":
            own = (local > 0) & (local < n) | (tokens == 0)  # plant: vocab-edge
        found = self.weight[local.masked_fill(~own, 0)] * own[..., None]
        return close_region(found, topo)

    def losses(self, x: Tensor, targets: Tensor, *, z: float | None = None) -> Tensor:
        """Return the loss of each token (positions, rows) for the stream `x`."""
        x = open_region(x, self.topo)
        logits = F.linear(x, self.weight).flatten(0, 1)
        z = self.z if z is None else z
        return CrossEntropy.apply(logits, targets.clamp(min=0).flatten(), z, self.topo).view(targets.shape)
