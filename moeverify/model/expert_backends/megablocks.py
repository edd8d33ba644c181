"""The router, dispatch and experts of megablocks (dMoE), an optional package."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from moeverify.cases.rule import blame, experts, reading, reference_model
from moeverify.cases.schema import Case, MoE
from moeverify.errors import Problem
from moeverify.model.expert_backends import ExpertBackend
from moeverify.model.megablocks.requirements import NEEDED
from moeverify.results.obstacle import MissingPackages, Obstacle, UnsupportedHere

if TYPE_CHECKING:
    from torch import nn

    from moeverify.model.precision import Factory

_BLOCK_ROWS = 128  # rows of a block of megablocks' sparse matrices

# Settings without an alternative in the package: field of `recipe.model.moe` -> its value.
_ONLY = {
    "score": "softmax",
    "route_scale": 1.0,
    "num_groups": 1,
    "router_bias": False,
    "expert_bias": False,
    "shared_gate": False,
    "selection_bias_rate": 0.0,
    "idle_experts": 0,
}


@reading(
    *(f"layout.{name}" for name in ("experts", "tp", "pp", "etp", "data_parallel", "parallelize")),
    "recipe.model",
    "recipe.model.moe",
)
def supported(case: Case) -> Iterator[Problem]:
    """Reject options and layouts that megablocks' router and experts do not support."""
    moe, layout, model, path = experts(case), case.layout, reference_model(case), "layout.experts"
    if moe is None or model is None:
        return
    if layout.parallelize is not None:
        yield blame(path, "megablocks' experts cannot be divided by your own function", "remove one")
    for name, degree in (("tp", layout.tp), ("pp", layout.pp), ("etp", layout.etp or 1)):
        if degree > 1:
            message = f"megablocks' experts together with {name} are not supported"
            yield blame(f"layout.{name}", message, f"remove {name}, or write `experts: loop`")
    if layout.data_parallel == "fsdp1":
        message = "fsdp1 together with megablocks' experts is not supported"
        yield blame("layout.data_parallel", message, "write `data_parallel: fsdp2`")
    for name, only in _ONLY.items():
        if getattr(moe, name) != only:
            written = json.dumps(only).strip('"')
            message = f"megablocks has no {name} but {written}"
            remedy = f"set recipe.model.moe.{name} to {written}, or write `experts: loop`"
            yield blame(path, message, remedy)
    if moe.shared_hidden and model.mlp_bias:
        message = "megablocks' shared expert has no bias"
        yield blame(path, message, "set recipe.model.mlp_bias to false")
    if moe.num_experts * moe.expert_hidden < _BLOCK_ROWS:
        message = f"megablocks needs num_experts x expert_hidden of {_BLOCK_ROWS} at least"
        yield blame(path, message, "use more or larger experts")


@reading(
    *(f"layout.{name}" for name in ("experts", "data_parallel", "dp_shard", "cp", "ep")),
    "recipe.model.moe.num_experts",
)
def whole_experts(case: Case) -> Iterator[Problem]:
    """Require whole experts in each FSDP2 shard: other rows of stacked experts have no logical region."""
    moe, layout = experts(case), case.layout
    if moe is None or layout.data_parallel != "fsdp2":
        return
    shards = layout.dp_shard * layout.cp
    if moe.num_experts % shards:
        message = (
            f"recipe.model.moe.num_experts {moe.num_experts} does not give whole experts to {shards} shards"
        )
        yield blame("layout.experts", message, f"set it to a multiple of {shards}")


@reading("layout.experts", "layout.pp", "recipe.precision", "recipe.model.moe")
def unmixed_precision(case: Case) -> Iterator[Problem]:
    """Reject mixed precision: the package uses a single dtype."""
    if case.recipe.precision == "mixed" and experts(case) is not None:
        message = "mixed together with megablocks' experts is not supported"
        remedy = "write `experts: grouped_mm`, or the precision float32 or bfloat16"
        yield blame("recipe.precision", message, remedy)


class _Megablocks(ExpertBackend):
    rules = (supported, whole_experts, unmixed_precision)

    def find_obstacle(self, case: Case, device: str, backend: str) -> Obstacle | None:
        missing = tuple(name for name in NEEDED if importlib.util.find_spec(name) is None)
        if missing:
            return MissingPackages(needed_by="megablocks", packages=missing, install="make megablocks")
        if device == "cuda" and case.recipe.precision == "float64":
            return UnsupportedHere(
                why="megablocks' compiled kernels copy rows in float32; only interpreted, on a CPU, they take float64"
            )
        return None

    def build_block(self, hidden: int, spec: MoE, *, factory: Factory) -> nn.Module:
        from moeverify.model.megablocks.package import import_package

        import_package(factory["dtype"])
        from moeverify.model.megablocks.block import DroplessMoE

        block: nn.Module = DroplessMoE(hidden, spec, factory=factory)
        return block


IMPLEMENTATION = _Megablocks()
