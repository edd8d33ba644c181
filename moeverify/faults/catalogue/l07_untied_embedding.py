"""The two copies of a tied embedding, on the first and the last stage, are not reduced."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_case
from moeverify.layout.local_shard import LocalShard
from moeverify.parallel import plan
from moeverify.parallel.meshes import Meshes
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject() -> None:
    """Skip the sum over the embedding's group."""

    def sum_tied(holdings: Sequence[LocalShard], meshes: Meshes) -> None:
        return None

    plan._sum_tied = sum_tied


FAULT = Fault(
    number="L07",
    title="embedding and head of a tied model drift apart",
    source="NVIDIA/Megatron-LM #656",
    mechanism="the all-reduce of the gradients of the tied weight over the first and the last stage is left out",
    trigger="a pipeline with a tied embedding",
    case=make_case("l07", preset="stress-tied", pp=2, micro_batches=2),
    expected=Expected(where=(At(name="embed*", axis="pp"),), causes=(Cause.MISSING_REDUCTION,)),
    inject=inject,
    is_moe=False,
)
