"""The squares of replicated gradients are summed over the ranks of the shards, once per copy."""

from __future__ import annotations

from moeverify.faults.catalogue.gradient_norm.measured import sum_squares_over_world
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.results.place import Stage


def inject(patch: Patch) -> None:
    """Sum the squares of plain gradients over the ranks of the shards, which here are all ranks."""
    from torch.distributed.tensor import DTensor

    sum_squares_over_world(
        patch, lambda shards, is_flat: any(isinstance(shard.tensor, DTensor) for shard in shards)
    )


FAULT = Fault(
    number="H11",
    title="the gradient norm counts a replicated parameter once a rank",
    source="mindspore-ai/hyper-parallel #526",
    mechanism="norms of parameters that are not sharded go into the sum over the shard group like those of shards",
    trigger="shards beside replicated parameters",
    case=make_case("h11", preset="tiny-gpt", tp=2),
    expected=Expected(where=(At(stage=Stage.GRADIENT_NORM),), causes=(Cause.NORM,)),
    inject=inject,
    is_moe=False,
    notes="upstream's shards were FSDP's; here they are those of tp, beside which the norms are replicated",
)
