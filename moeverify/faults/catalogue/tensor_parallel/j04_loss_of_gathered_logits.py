"""A loss for sharded logits gets gathered ones, so every rank adds the whole sum of exponentials."""

from __future__ import annotations

import math

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause

TP = 2


def inject(patch: Patch) -> None:
    """Compute the loss as if each tp rank had its own part of the vocabulary."""
    import torch.distributed as dist
    from torch import Tensor

    from moeverify.train.data import IGNORED
    from moeverify.train.forward import cross_entropy

    @patch.replace(cross_entropy)
    def sum_again(logits: Tensor, targets: Tensor) -> Tensor:
        # The sum of exponentials is TP times too large. The target's logit is on rank 0 only, like a
        # shard's.
        total = logits.logsumexp(dim=-1)
        shared = total.detach() + (total - total.detach()) / TP + math.log(TP)
        chosen = logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        target = chosen if dist.get_rank() == 0 else chosen.detach()
        return (shared - target) * (targets != IGNORED)


FAULT = Fault(
    number="J04",
    title="the loss is too large by the logarithm of tp",
    source="NVIDIA/Megatron-LM issue #7452, item 2",
    mechanism="the parallel cross entropy runs on logits that have been gathered already",
    trigger="tp with gathered logits",
    case=make_case("j04", preset="tiny-gpt", tp=TP),
    expected=Expected(
        where=(
            At(name="lm"),
            At(name="sum_again"),
            At(axis="tp"),
            At(term="lm"),
        ),
        causes=(
            Cause.FORWARD,
            Cause.METRIC,
        ),
    ),
    inject=inject,
    is_moe=False,
)
