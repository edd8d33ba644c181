"""Expert counts are summed over the data ranks but not over tp, whose ranks route other tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Omit tp from the sum of the counts that move the selection bias."""
    from torch import Tensor

    from moeverify.cases.schema import MoE
    from moeverify.parallel.regions.observer import Observer
    from moeverify.train.program import Program
    from moeverify.train.routing import update_selection_bias

    @patch.wrap(update_selection_bias)
    def count_own(
        original: Original[None],
        moe: MoE,
        program: Program,
        counts: Sequence[Tensor],
        observer: Observer,
        step: int,
    ) -> None:
        sums = replace(program.sums, over_tokens=program.sums.over_batch)
        original(moe, replace(program, sums=sums), counts, observer, step)


FAULT = Fault(
    number="D06",
    title="expert counts are not summed over tp",
    source="pytorch/torchtitan PR #4154 (f3660a493)",
    mechanism="one axis of the mesh is missing from the all-reduce of the counts",
    trigger="tp that slices tokens",
    case=make_case("d06", tp=2, ep=2),
    expected=Expected(
        where=(At(name="*.moe.router*", axis="tp"),),
        causes=(
            Cause.STATE,
            Cause.MISSING_REDUCTION,
        ),
    ),
    inject=inject,
)
