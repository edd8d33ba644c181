"""The optimizer step: weights that computation goes on to use as they were before it.

Class N. Gradients and updates are right, but forward passes do not see the updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moeverify.faults.fault import fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.results.place import Stage

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from moeverify.cases.schema import Optimizer as OptimizerSpec
    from moeverify.model.transformer import Transformer
    from moeverify.parallel.ddp import Accumulate
    from moeverify.parallel.gradients import Reduction
    from moeverify.parallel.regions.local_shard import LocalShard


@fault(
    "N01",
    title="the optimizer begins one step too late",
    source="NVIDIA/Megatron-LM PR #5976 (ce8a8a736f)",
    mechanism="a synthetic step that creates the optimizer's state leaves its counter at 1, and the bias "
    "correction is that of the next step",
    trigger="a state that is made before training",
    case=make_case("n01", preset="tiny-gpt", dp_shard=2, optimizer="adamw"),
    where=(At(stage=Stage.OPTIMIZER_STEP),),
    causes=(Cause.STATE,),
    is_moe=False,
)
def n01_step_before_training(patch: Patch) -> None:
    """Step a fresh optimizer once on zero gradients, with rate 0."""
    import torch

    from moeverify.train.optimizer import build_optimizer

    @patch.wrap(build_optimizer)
    def step_once(
        original: Original[Optimizer], spec: OptimizerSpec, shards: Sequence[LocalShard], kernels: str
    ) -> Optimizer:
        optimizer = original(spec, shards, kernels)
        rates = [group["lr"] for group in optimizer.param_groups]
        for shard in shards:
            shard.tensor.grad = torch.zeros_like(shard.tensor)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)
        return optimizer


STALE_LAYER = "1"


@fault(
    "N02",
    title="weights to compute with are stale after the optimizer step",
    source="NVIDIA/Megatron-LM PR #6336 (1d402ad6e2)",
    mechanism="some groups' copy for computation is never refreshed from the weights that were updated",
    trigger="FSDP with a copy of the weights for computation, from the second step on",
    case=make_case("n02", dp_shard=2),
    where=(At(name="layers.1.*"), At(name="layers.1")),
    causes=(Cause.STALE,),
    is_moe=False,
    notes="upstream the copy is a low-precision one; here it is the weight that FSDP2 gathers",
)
def n02_stale_compute_weights(patch: Patch) -> None:
    """Keep the gathered weights of one block after the first forward pass."""
    from torch.distributed.fsdp import FSDPModule

    from moeverify.parallel.fsdp2 import apply_fsdp2

    @patch.wrap(apply_fsdp2)
    def keep_gathered(
        original: Original[Accumulate], model: Transformer, *args: Any, **named: Any
    ) -> Accumulate:
        accumulate = original(model, *args, **named)
        block = model.layers[STALE_LAYER]
        assert isinstance(block, FSDPModule)
        block.set_reshard_after_forward(False, recurse=False)
        block.set_reshard_after_backward(False, recurse=False)
        return accumulate


@fault(
    "N03",
    title="gradients begin from the weights in a buffer that is used again",
    source="NVIDIA/Megatron-LM PR #4609 (b25a76e000)",
    mechanism="the buffer of gradients receives gathered parameters and is not set to zero: the next "
    "accumulation starts from them",
    trigger="overlapped gathers, from the second step on",
    case=make_case("n03", preset="tiny-gpt", dp_replicate=2, data_parallel="ddp"),
    where=(At(stage=Stage.BACKWARD),),
    causes=(Cause.STALE,),
    is_moe=False,
)
def n03_buffer_not_zeroed(patch: Patch) -> None:
    """Add the weight to each gradient from the second step on."""
    from torch.utils.weak import WeakIdKeyDictionary

    from moeverify.parallel.gradients import finalize_gradients

    num_steps: Any = WeakIdKeyDictionary()  # by the first parameter of a run

    @patch.wrap(finalize_gradients)
    def begin_from_weights(
        original: Original[None], parameters: Sequence[Tensor], reductions: Sequence[Reduction]
    ) -> None:
        original(parameters, reductions)
        num_steps[parameters[0]] = num_steps.get(parameters[0], 0) + 1
        if num_steps[parameters[0]] > 1:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.add_(parameter.detach())
