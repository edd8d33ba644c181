"""The selection bias moves after every micro-batch instead of once per step by the whole batch's counts."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.results.checks import Kind


def inject(patch: Patch) -> None:
    """Move the bias after the backward pass of each micro-batch; the end of the step only reports counts."""
    from torch import Tensor

    from moeverify.cases.schema import MoE, Recipe, ReferenceModel
    from moeverify.parallel.regions.observer import Observer
    from moeverify.parallel.regions.region import Region
    from moeverify.train.data import Batch
    from moeverify.train.program import Program, Source
    from moeverify.train.routing import move_bias, observe_routing, update_selection_bias

    @patch.wrap(observe_routing)
    def move_early(
        original: Original[list[Tensor]],
        recipe: Recipe,
        program: Program,
        batch: Batch,
        observer: Observer,
        step: int,
        replayed: Source | None,
    ) -> list[Tensor]:
        counts = original(recipe, program, batch, observer, step, replayed)
        moe = recipe.model.moe if isinstance(recipe.model, ReferenceModel) else None
        for router, local in zip(program.routers, counts, strict=True):
            bias = router.module.selection_bias
            if moe is not None and bias is not None:
                move_bias(bias, program.sums.over_tokens(local), moe.selection_bias_rate)
        return counts

    @patch.replace(update_selection_bias)
    def report_counts(
        moe: MoE, program: Program, counts: Sequence[Tensor], observer: Observer, step: int
    ) -> None:
        for router, local in zip(program.routers, counts, strict=True):
            total = program.sums.over_tokens(local)
            observer.observe(step, Kind.ROUTER_COUNTS, router.name, total, Region.whole(total.shape))


FAULT = Fault(
    number="D01",
    title="the selection bias moves with every micro-batch",
    source="pytorch/torchtitan PR #1304, PR #1324",
    mechanism="updated in a hook of the backward pass, so later micro-batches of a step route with another bias",
    trigger="gradient accumulation with loss-free balancing",
    case=make_case("d01", dp_shard=2, micro_batches=2),
    expected=Expected(where=(At(name="*.moe.router*"),), causes=(Cause.STATE,)),
    inject=inject,
)
