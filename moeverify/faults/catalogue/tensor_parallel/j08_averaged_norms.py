"""Gradients of sequence-parallel norms are averaged over tp instead of summed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Divide the gradients that are summed over tp by the tp degree."""
    from torch import nn

    from moeverify.cases.schema import Layout
    from moeverify.parallel.gradients import Reduction
    from moeverify.parallel.meshes import Meshes
    from moeverify.parallel.plan import list_reductions
    from moeverify.parallel.regions.local_shard import LocalShard

    @patch.wrap(list_reductions)
    def average_over_tp(
        original: Original[list[Reduction]],
        model: nn.Module,
        shards: Sequence[LocalShard],
        layout: Layout,
        meshes: Meshes,
        partial_names: Mapping[str, set[str]],
    ) -> list[Reduction]:
        found = original(model, shards, layout, meshes, partial_names)
        return [
            replace(item, divisor=float(layout.tp)) if item.group is meshes.group("tp") else item
            for item in found
        ]


FAULT = Fault(
    number="J08",
    title="gradients of sequence-parallel norms are tp times too small",
    source="EleutherAI/gpt-neox PR #1259",
    mechanism="the hook that all-reduces the gradients of norms averages over tp instead of summing",
    trigger="tp with sequence parallelism",
    case=make_case("j08", preset="tiny-gpt", tp=2, sequence_parallel=True),
    expected=Expected(where=(At(name="*norm.weight"), At(name="*norm.bias")), causes=(Cause.SCALE,)),
    inject=inject,
    is_moe=False,
)
