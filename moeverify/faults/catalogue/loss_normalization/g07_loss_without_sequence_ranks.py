"""The token count covers the sequence ranks but the loss factor does not, so the loss has a factor 1/cp."""

from __future__ import annotations

from moeverify.faults.catalogue.loss_normalization.losses import multiply
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Divide the losses by the number of ranks that share a sequence, which here are all ranks."""
    multiply(patch, lambda program: 1 / program.scale)


FAULT = Fault(
    number="G07",
    title="loss and gradients are cp times too small under Ulysses",
    source="ByteDance-Seed/VeOmni PR #338; volcengine/verl PR #3691",
    mechanism="the denominator is all-reduced over dp * sp ranks, the numerator multiplied by dp only",
    trigger="sequence parallelism by all-to-all",
    case=make_case("g07", preset="tiny-gpt", cp=2, context_parallel="alltoall"),
    expected=Expected(where=(At(axis="cp"),), causes=(Cause.SCALE,)),
    inject=inject,
    is_moe=False,
)
