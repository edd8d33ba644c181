"""One replicated parameter is marked as sharded over tp, and counts once per rank."""

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
    """Count the squares of the query norms once per tp rank."""
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
        marked = [shard for shard in shards if shard.name.endswith("attention.q_norm.weight")]
        norm = original(shards, sum_over_shards, sum_over_stages)
        again = original(marked, sum_over_shards, sum_over_stages)
        return (norm.square() + (TP - 1) * again.square()).sqrt()


FAULT = Fault(
    number="H12",
    title="the gradient norm counts one parameter of attention once a rank",
    source="NVIDIA/Megatron-LM issue #7452, item 8",
    mechanism="the attribute that says that a parameter is replicated over tp is wrong",
    trigger="tp",
    case=make_case("h12", tp=TP),
    expected=Expected(
        where=(
            At(stage=Stage.GRADIENT_NORM, axis="tp"),
            At(name="*q_norm*"),
        ),
        causes=(Cause.NORM,),
    ),
    inject=inject,
    is_moe=False,
    notes="upstream's parameter is the attention sink, which the reference model lacks",
)
