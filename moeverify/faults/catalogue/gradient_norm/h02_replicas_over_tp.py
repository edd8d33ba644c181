"""Squares of parameters that are replicated over tp are summed over tp."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.results.place import Stage

TP = 2


def inject(patch: Patch) -> None:
    """Count the squares of parameters not sharded over tp once per tp rank."""
    from torch import Tensor

    from moeverify.parallel.regions.local_shard import LocalShard
    from moeverify.train.clipping import SumOverShards, gradient_norm

    @patch.wrap(gradient_norm)
    def count_again(
        original: Original[Tensor],
        shards: Sequence[LocalShard],
        sum_over_shards: SumOverShards | None = None,
        sum_over_stages: SumOverShards | None = None,
    ) -> Tensor:
        copies = [shard for shard in shards if not is_sharded(shard.tensor)]
        norm = original(shards, sum_over_shards, sum_over_stages)
        again = original(copies, sum_over_shards, sum_over_stages)
        return (norm.square() + (TP - 1) * again.square()).sqrt()


def is_sharded(tensor: object) -> bool:
    """Return whether a tensor is sharded over tp."""
    mesh = getattr(tensor, "device_mesh", None)
    names = () if mesh is None else mesh.mesh_dim_names or ()
    placements = getattr(tensor, "placements", ())
    return any(name == "tp" and place.is_shard() for name, place in zip(names, placements, strict=True))


FAULT = Fault(
    number="H02",
    title="the gradient norm counts parameters that are replicated over tp once a rank",
    source="NVIDIA-NeMo/RL PR #3788",
    mechanism="the squares of all gradients are summed over tp",
    trigger="tp beside shards of data parallelism",
    case=make_case("h02", preset="tiny-gpt", dp_shard=2, tp=TP),
    expected=Expected(where=(At(stage=Stage.GRADIENT_NORM, axis="tp"),), causes=(Cause.NORM,)),
    inject=inject,
    is_moe=False,
)
