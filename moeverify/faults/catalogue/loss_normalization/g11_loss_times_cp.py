"""The loss is multiplied by cp although the average over data ranks already includes cp."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Scale the loss by cp a second time before the backward pass."""
    from moeverify.cases.schema import Layout
    from moeverify.model.transformer import Transformer
    from moeverify.parallel.meshes import Meshes
    from moeverify.parallel.plan import Parallelized, parallelize

    @patch.wrap(parallelize)
    def multiply_by_cp(
        original: Original[Parallelized],
        model: Transformer,
        layout: Layout,
        meshes: Meshes,
        *args: Any,
        **named: Any,
    ) -> Parallelized:
        done = original(model, layout, meshes, *args, **named)
        return replace(done, num_loss_ranks=done.num_loss_ranks * meshes.size("cp"))


FAULT = Fault(
    number="G11",
    title="gradients are cp times too large",
    source="NVIDIA/Megatron-LM #673, #906, !2756",
    mechanism="the loss is multiplied by the size of cp, which the division of the gradients does not undo",
    trigger="context parallelism",
    case=make_case("g11", preset="tiny-gpt", cp=2),
    expected=Expected(where=(At(axis="cp"),), causes=(Cause.SCALE,)),
    inject=inject,
    is_moe=False,
)
