"""Copies of an expert average their gradients, and the call that scales them for ep has been commented out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from moeverify.case.schema import Layout
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.parallel import plan
from moeverify.parallel.gradients import Reduction
from moeverify.parallel.meshes import Meshes
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject() -> None:
    """Divide expert gradients by the number of copies alone."""

    def reduce_experts(experts: Sequence[Tensor], layout: Layout, meshes: Meshes) -> list[Reduction]:
        copies = float(meshes.size("edp"))
        return [replace(reduction, divisor=copies) for reduction in original(experts, layout, meshes)]

    original = plan._expert_reductions
    plan._expert_reductions = reduce_experts


FAULT = Fault(
    number="A14",
    title="the scaling of expert gradients for ep is never called",
    source="huggingface/nanotron 2dd40d35",
    mechanism="gradients are averaged over the copies of an expert only, since scale_gradients() was commented out",
    trigger="expert parallelism with several copies of each expert",
    case=make_case("a14", dp_replicate=4, data_parallel="ddp", ep=2),
    expected=Expected(where=(At(name="*.moe.experts*"),), causes=(Cause.SCALE,)),
    inject=inject,
)
