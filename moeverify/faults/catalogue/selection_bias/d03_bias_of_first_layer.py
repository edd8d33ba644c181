"""The update of the selection bias stops at the first layer without one."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Move only the bias of the first router; count for all."""
    from torch import Tensor

    from moeverify.cases.schema import MoE
    from moeverify.parallel.regions.observer import Observer
    from moeverify.train.program import Program
    from moeverify.train.routing import move_bias, update_selection_bias

    moved: list[Tensor] = []

    @patch.wrap(update_selection_bias)
    def begin(
        original: Original[None],
        moe: MoE,
        program: Program,
        counts: Sequence[Tensor],
        observer: Observer,
        step: int,
    ) -> None:
        moved.clear()
        original(moe, program, counts, observer, step)

    @patch.wrap(move_bias)
    def move_first(original: Original[None], bias: Tensor, counts: Tensor, rate: float) -> None:
        if not moved:
            original(bias, counts, rate)
        moved.append(bias)


FAULT = Fault(
    number="D03",
    title="the selection bias of later layers never moves",
    source="pytorch/torchtitan PR #3686 (cf066ac34)",
    mechanism="`return` where `continue` is meant: the first layer without a bias ends the loop over the layers",
    trigger="layers with and without balancing",
    case=make_case("d03", dp_shard=2),
    expected=Expected(
        where=(At(name="layers.2.moe.router*"),),
        causes=(
            Cause.STALE,
            Cause.STATE,
        ),
    ),
    inject=inject,
    notes="the reference model balances all of its layers: the loop ends after the first of them",
)
