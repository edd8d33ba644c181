"""One fault written in three ways, for `--fault fault_programs:NAME`: undivided expert gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from moeverify.cases.schema import Layout
from moeverify.faults.patch import Original, Patch
from moeverify.parallel import plan
from moeverify.parallel.gradients import Reduction
from moeverify.parallel.meshes import Meshes


def wrap(patch: Patch) -> None:
    """Inject the fault with the patch of the case."""

    @patch.wrap(plan.expert_reductions)
    def undivided(
        original: Original[list[Reduction]], experts: Sequence[Tensor], layout: Layout, meshes: Meshes
    ) -> list[Reduction]:
        return [replace(item, divisor=1.0) for item in original(experts, layout, meshes)]


def assign() -> None:
    """Inject the fault by assigning to a module. The error doubles each time an assignment stays behind."""
    original = plan.expert_reductions

    def undivided(experts: Sequence[Tensor], layout: Layout, meshes: Meshes) -> list[Reduction]:
        return [replace(item, divisor=item.divisor / 2.0) for item in original(experts, layout, meshes)]

    plan.expert_reductions = undivided


def fail_half_way(patch: Patch) -> None:
    """Inject the fault with the patch, then raise an error."""
    wrap(patch)
    raise ZeroDivisionError("planted after the first wrapper")
