"""Precision: sums and buffers in a narrower dtype than the recipe asks for, or a wider one.

Class M. The error is as large as rounding and has no direction. Below float64 only dtypes distinguish it
from noise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moeverify.faults.fault import fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.results.place import Stage

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


@fault(
    "M01",
    title="micro-batch gradients are accumulated in bfloat16",
    source="ISEEKYAN/Megatron-LM #149, PR #146",
    mechanism="the buffer between micro-batches is bfloat16, only the last reduction is float32",
    trigger="FSDP with gradient accumulation",
    case=make_case("m01", dp_shard=2, micro_batches=4, recipe={"precision": "float32"}),
    where=(At(stage=Stage.BACKWARD),),
    causes=(Cause.ROUNDING,),
    precisions=("float64", "float32"),
    is_moe=False,
    notes="every gradient is at fault, so every place counts as right; shown in a float32 recipe, since a bfloat16 "
    "recipe keeps all gradients in bfloat16 anyway",
)
def m01_accumulation_in_bf16(patch: Patch) -> None:
    """Round the gradients that FSDP2 keeps between micro-batches."""
    import torch
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    @patch.wrap(FSDPParam.to_accumulated_grad_if_needed)
    def accumulate_narrow(original: Original[None], self: FSDPParam) -> None:
        original(self)
        gradient = self._unsharded_param.grad
        if gradient is not None:
            gradient.copy_(gradient.to(torch.bfloat16))


@fault(
    "M02",
    title="gradients are reduced in bfloat16",
    source="pytorch/pytorch #106395, PR #194628",
    mechanism="the sums over ranks, and over replicas in HSDP, are held in the dtype of the reduction",
    trigger="FSDP or HSDP with a bfloat16 reduction",
    case=make_case("m02", dp_replicate=2, dp_shard=2, recipe={"precision": "float32"}),
    where=(At(stage=Stage.BACKWARD),),
    causes=(Cause.ROUNDING,),
    precisions=("float64", "float32"),
    is_moe=False,
    notes="every gradient is at fault, so every place counts as right; shown in a float32 recipe, since a bfloat16 "
    "recipe keeps all gradients in bfloat16 anyway; M04 is the same in mixed precision",
)
def m02_reduction_in_bf16(patch: Patch) -> None:
    """Set FSDP2's reduce dtype to bfloat16; parameters and computation keep the recipe's precision."""
    import torch
    from torch.distributed.fsdp import fully_shard

    from moeverify.parallel import fsdp2

    @patch.wrap(fully_shard, used_by=fsdp2)
    def reduce_narrow(original: Original[Any], *args: Any, **named: Any) -> Any:
        policy = replace(named["mp_policy"], reduce_dtype=torch.bfloat16)
        return original(*args, **{**named, "mp_policy": policy})


@fault(
    "M03",
    title="combine is reduced over TP in bfloat16",
    source="NVIDIA/Megatron-LM !2942 (325e7c8017)",
    mechanism="the reduction over TP is not done in the wider dtype of the router",
    trigger="TP + EP with experts sliced over TP",
    case=make_case("m03", dp_shard=2, tp=2, ep=2, etp=2, recipe={"precision": "float32"}),
    where=(At(name="layers.1.moe*"), At(axis="tp")),
    causes=(Cause.ROUNDING,),
    precisions=("float64", "float32"),
    notes="shown in a float32 recipe, since in a bfloat16 recipe the layout reduces in bfloat16 itself; "
    "the mechanism is known from the title of the source only",
)
def m03_combine_in_bf16(patch: Patch) -> None:
    """Cast the partial outputs to bfloat16 for the reduction of the combine."""
    import torch

    from moeverify.parallel import moe_tensor
    from moeverify.parallel.collectives import reduce_from

    @patch.wrap(reduce_from, used_by=moe_tensor)
    def reduce_narrow(original: Original[Tensor], x: Tensor, group: ProcessGroup) -> Tensor:
        return original(x.to(torch.bfloat16), group).to(x.dtype)


@fault(
    "M04",
    title="gradients are reduced in the dtype of the arithmetic",
    source="ibm-granite/dolomite-engine PR #141",
    mechanism="the policy of mixed precision sets no reduce_dtype, and FSDP2 falls back to param_dtype",
    trigger="FSDP or HSDP in mixed precision",
    case=make_case("m04", dp_replicate=2, dp_shard=2, recipe={"precision": "mixed"}),
    where=(At(name="the model"),),
    causes=(Cause.PRECISION,),
    precisions=("mixed",),
    is_moe=False,
    notes="M02 where most people meet it: the bounds of mixed precision are wider than the error of the reduction, "
    "so it is seen by the dtype of the collectives alone",
)
def m04_reduction_in_compute_dtype(patch: Patch) -> None:
    """Give FSDP2 a policy without a reduce dtype, which then defaults to the compute dtype."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from moeverify.parallel.fsdp2 import choose_policy

    patch.replace(choose_policy)(lambda model, compute: MixedPrecisionPolicy(param_dtype=compute))


@fault(
    "M05",
    title="the policy of mixed precision is not passed on",
    source="pytorch/pytorch PR #80869",
    mechanism="the wrapper never sees the policy, and computes with parameters as they are stored",
    trigger="FSDP or HSDP in mixed precision",
    case=make_case("m05", dp_shard=2, ep=2, recipe={"precision": "mixed"}),
    where=(At(name="the model"),),
    causes=(Cause.PRECISION,),
    precisions=("mixed",),
    is_moe=False,
    notes="the results are nearer to the golden than they should be, so no bound can see it",
)
def m05_policy_not_passed_on(patch: Patch) -> None:
    """Give FSDP2 the default policy, which changes nothing."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from moeverify.parallel.fsdp2 import choose_policy

    patch.replace(choose_policy)(lambda model, compute: MixedPrecisionPolicy())
