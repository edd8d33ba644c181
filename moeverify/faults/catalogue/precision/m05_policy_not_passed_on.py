"""The mixed-precision policy is not applied, so everything is computed in the parameters' dtype."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Give FSDP2 the default policy, which changes nothing."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from moeverify.parallel.fsdp2 import choose_policy

    patch.replace(choose_policy)(lambda model, compute: MixedPrecisionPolicy())


FAULT = Fault(
    number="M05",
    title="the policy of mixed precision is not passed on",
    source="pytorch/pytorch PR #80869",
    mechanism="the wrapper never sees the policy, and computes with parameters as they are stored",
    trigger="FSDP or HSDP in mixed precision",
    case=make_case("m05", dp_shard=2, ep=2, recipe={"precision": "mixed"}),
    expected=Expected(where=(At(name="the model"),), causes=(Cause.PRECISION,)),
    inject=inject,
    precisions=("mixed",),
    is_moe=False,
    notes="the results are nearer to the golden than they should be, so no bound can see it",
)
