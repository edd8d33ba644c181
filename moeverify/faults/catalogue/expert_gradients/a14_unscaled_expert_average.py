"""Copies of an expert average their gradients, but the call that scales them for ep is commented out."""

from __future__ import annotations

from dataclasses import replace

from moeverify.faults.catalogue.expert_gradients.reductions import change_reductions
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Divide expert gradients by the number of copies alone."""
    change_reductions(patch, lambda reduction, meshes: replace(reduction, divisor=float(meshes.size("edp"))))


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
