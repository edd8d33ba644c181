"""Gradients are reduced in the compute dtype, because the policy sets no reduce dtype."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Give FSDP2 a policy without a reduce dtype, which then defaults to the compute dtype."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from moeverify.parallel.fsdp2 import choose_policy

    patch.replace(choose_policy)(lambda model, compute: MixedPrecisionPolicy(param_dtype=compute))


FAULT = Fault(
    number="M04",
    title="gradients are reduced in the dtype of the arithmetic",
    source="ibm-granite/dolomite-engine PR #141",
    mechanism="the policy of mixed precision sets no reduce_dtype, and FSDP2 falls back to param_dtype",
    trigger="FSDP or HSDP in mixed precision",
    case=make_case("m04", dp_replicate=2, dp_shard=2, recipe={"precision": "mixed"}),
    expected=Expected(where=(At(name="the model"),), causes=(Cause.PRECISION,)),
    inject=inject,
    precisions=("mixed",),
    is_moe=False,
    notes=(
        "M02 where most people meet it: the bounds of mixed precision are wider than what the reduction adds, so it "
        "is seen by the dtype of the collectives alone"
    ),
)
