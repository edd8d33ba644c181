"""Log-probabilities and entropies under a vocabulary that the ranks of tp share."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from marten.comms import agree, collect, pool, total
from marten.fleet import Fleet


def normalizer(weights: Tensor, fleet: Fleet) -> Tensor:
    """Return sums of exponentials over the whole vocabulary."""
    if fleet.flagged("marten-norm-gathered"):
        return collect(weights.sum(-1)[None], fleet.tp).sum(0)  # plant: marten-norm-gathered
    if fleet.flagged("marten-norm-pool"):
        return pool(weights.sum(-1), fleet.tp)  # plant: marten-norm-pool
    return agree(weights.sum(-1), fleet.tp)  # anchor: norm


def score_labels(logits: Tensor, labels: Tensor, fleet: Fleet) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies (tokens) for logits (tokens, part of the vocabulary)."""
    tp, n = fleet.tp, logits.shape[-1]
    most = logits.detach().amax(-1)
    shifted = logits - total(most, tp, dist.ReduceOp.MAX)[:, None]
    weights = shifted.exp()
    norm = normalizer(weights, fleet)
    local = labels - tp.rank * n
    foreign = (local < 0) | (local >= n)
    picked = shifted.gather(1, local.masked_fill(foreign, 0)[:, None])[:, 0]
    log_probs = agree(picked * ~foreign, tp) - norm.log()
    if fleet.flagged("marten-entropy-softmax"):
        probs = weights / weights.sum(-1, keepdim=True)  # plant: marten-entropy-softmax
        return log_probs, agree(-(probs * probs.log()).sum(-1), tp)  # plant: marten-entropy-softmax
    mean = agree((weights * shifted).sum(-1), tp) / norm  # anchor: entropy
    return log_probs, norm.log() - mean
