"""Each pipeline stage clips by the norm of its own gradients."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.results.place import Stage


def inject(patch: Patch) -> None:
    """Omit the sum over the stages."""
    from torch import Tensor

    from moeverify.parallel.regions.local_shard import LocalShard
    from moeverify.train.clipping import SumOverShards, gradient_norm

    @patch.wrap(gradient_norm)
    def measure_stage(
        original: Original[Tensor],
        shards: Sequence[LocalShard],
        sum_over_shards: SumOverShards | None = None,
        sum_over_stages: SumOverShards | None = None,
    ) -> Tensor:
        del sum_over_stages
        return original(shards, sum_over_shards, None)


FAULT = Fault(
    number="H06",
    title="the gradient norm of each stage is its own",
    source="pytorch/torchtitan issue #596, PR #649",
    mechanism="the norm is not reduced over the stages",
    trigger="a pipeline",
    case=make_case("h06", preset="tiny-gpt", pp=2, micro_batches=2, stage_layers=(2, 1)),
    expected=Expected(where=(At(stage=Stage.GRADIENT_NORM, axis="pp"),), causes=(Cause.NORM,)),
    inject=inject,
    is_moe=False,
)
