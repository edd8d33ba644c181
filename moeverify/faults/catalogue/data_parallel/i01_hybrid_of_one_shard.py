"""FSDP1's hybrid strategy with one-rank shard groups falls back to no sharding and no reduction."""

from __future__ import annotations

from typing import Any

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Use a hybrid strategy on a mesh of (n, 1), over which torch reduces nothing."""
    from torch.distributed.device_mesh import DeviceMesh

    from moeverify.cases.schema import Fsdp1Strategy
    from moeverify.parallel.fsdp1 import STRATEGIES, choose_ranks

    @patch.replace(choose_ranks)
    def choose_hybrid(mesh: DeviceMesh, strategy: Fsdp1Strategy) -> dict[str, Any]:
        return {"device_mesh": mesh, "sharding_strategy": STRATEGIES[strategy, mesh.ndim]}


FAULT = Fault(
    number="I01",
    title="FSDP1's hybrid does not reduce over replicas of one rank",
    source="pytorch/pytorch #154888; volcengine/verl #7493",
    mechanism="HYBRID_SHARD on a mesh of (n, 1) becomes NO_SHARD over the shard group, whose size is 1",
    trigger="FSDP1 with replicas and shard groups of one rank",
    case=make_case("i01", preset="tiny-gpt", dp_replicate=2, data_parallel="fsdp1"),
    expected=Expected(where=(At(axis="dp_replicate"),), causes=(Cause.MISSING_REDUCTION,)),
    inject=inject,
    is_moe=False,
    notes="torch 2.13 still does it; the layout avoids it, and the fault takes that away",
)
