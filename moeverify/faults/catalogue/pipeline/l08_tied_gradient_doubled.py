"""The gradient of a tied weight is written back once for each of its uses."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause

VOCABULARY = 96  # of the case's model


def inject(patch: Patch) -> None:
    """Double the gradient of the embedding, which the head also uses."""
    from torch import Tensor

    from moeverify.parallel.gradients import Reduction, finalize_gradients

    @patch.wrap(finalize_gradients)
    def write_twice(
        original: Original[None], parameters: Sequence[Tensor], reductions: Sequence[Reduction]
    ) -> None:
        original(parameters, reductions)
        for parameter in parameters:
            if parameter.shape[0] == VOCABULARY and parameter.grad is not None:
                parameter.grad.mul_(2)


FAULT = Fault(
    number="L08",
    title="the gradient of a tied weight is doubled",
    source="pytorch/torchtitan PR #3174 (2b935fa3c)",
    mechanism="the full gradient of a weight with two uses is added once for each",
    trigger="a tied embedding",
    case=make_case("l08", preset="stress-tied", dp_shard=2),
    expected=Expected(where=(At(name="embed*"),), causes=(Cause.SCALE,)),
    inject=inject,
    is_moe=False,
)
