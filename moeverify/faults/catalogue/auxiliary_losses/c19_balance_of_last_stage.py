"""The router losses of all stages except the last are lost."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Drop the losses that earlier stages passed on."""
    from torch import Tensor

    from moeverify.model.router import RouterStats
    from moeverify.parallel.pipeline import Stage
    from moeverify.train.pipeline import StageWork

    @patch.wrap(StageWork.add)
    def forget_earlier(
        original: Original[Tensor],
        self: StageWork,
        stage: Stage,
        micro_batch: int,
        routers: Sequence[RouterStats],
        carried: Tensor | None,
    ) -> Tensor:
        return original(self, stage, micro_batch, routers, None if carried is None else carried * 0.0)


FAULT = Fault(
    number="C19",
    title="the router losses of early stages are lost",
    source="laekov/fastmoe PR #145",
    mechanism="the gate loss is collected on the last stage of a pipeline only",
    trigger="a pipeline with experts before its last stage",
    case=make_case("c19", pp=2, micro_batches=2, stage_layers=(2, 1)),
    expected=Expected(
        where=(
            At(name="layers.1.moe.router*"),
            At(term="balance"),
        ),
        causes=(
            Cause.TERM_SCALE,
            Cause.DETACHED,
        ),
    ),
    inject=inject,
)
