"""Fully sharded data parallelism by FSDP2, with experts on a mesh of their own.

Placement: every parameter Shard(0) on fsdp (and Replicate on dp_replicate), after what tp, ep and etp have
already cut. Gradients of parameters outside the experts are averaged over dp_replicate * fsdp, which is the
number of ranks over which the loss is split. Experts are held by dp_replicate * efsdp ranks, but their
gradient holds the tokens of all ranks of the loss, so it is divided by that number, not by its own mesh
(pytorch #160285). Experts that no two ranks share are left to themselves, and divided at the end. Where they have
copies and no shards (efsdp of 1), torch 2.13 applies a factor of its own twice in float64 and fp16; there FSDP2
averages over its mesh and `expert_divisor` is left for the end.

Mixed precision: FSDP2 gathers in the narrow dtype, and widens gradients before it reduces them. Experts that it
leaves alone compute with narrow copies too, and their gradients arrive widened.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from moeverify.model.experts import ExpertHolder, Experts
from moeverify.model.mixed_precision import narrow
from moeverify.model.param_access import View
from moeverify.model.transformer import Transformer
from moeverify.parallel.ddp import Accumulate
from moeverify.parallel.fsdp2_reshard import RESHARD, Reshard
from moeverify.seams import seam

AS_STORED = MixedPrecisionPolicy()
AFTER_FORWARD = RESHARD.find("forward")


@seam
def apply_fsdp2(
    model: Transformer,
    mesh: DeviceMesh,
    expert_mesh: DeviceMesh | None,
    num_loss_ranks: int,
    policy: MixedPrecisionPolicy = AS_STORED,
    reshard: Reshard = AFTER_FORWARD,
) -> Accumulate:
    """Shard the model in place and return its context for a micro-batch.

    `mesh` is (fsdp) or (dp_replicate, fsdp); `expert_mesh` is the same of the sparse view, for experts that
    are already sharded over ep or etp, or None where experts are like any other parameter.
    """
    whole: set[nn.Parameter] = set()
    for block in model.layers.values():
        if expert_mesh is not None:
            # Experts first: `fully_shard` takes only what no module inside has taken, and on their own mesh.
            shard_experts(block, expert_mesh, num_loss_ranks, policy)
            whole |= _leave_alone(block, policy)
        fully_shard(block, mesh=mesh, ignored_params=whole, mp_policy=policy)
    root = fully_shard(model, mesh=mesh, ignored_params=whole, mp_policy=policy)
    if not reshard.after_forward:
        root.set_reshard_after_forward(False)
    return _accumulation(root, reshard)


@seam
def choose_policy(model: nn.Module, compute: torch.dtype | None) -> MixedPrecisionPolicy:
    """Return what makes FSDP2 compute in a dtype, by default that of the parameters, and reduce in theirs."""
    stored = next(model.parameters()).dtype
    if compute is None or compute == stored:
        return AS_STORED
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=stored)


def keep_gathered(model: nn.Module) -> None:
    """Let a pipeline stage keep its gathered parameters from one micro-batch to the next.

    Zero-bubble schedules need it: torch looks for the parameters of a stage before the backward pass gathers
    them, and those that it does not find get no gradient, silently.
    """
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_forward(False)


def _leave_alone(block: nn.Module, policy: MixedPrecisionPolicy) -> set[nn.Parameter]:
    """Return the experts' parameters that a rank keeps whole, which FSDP2 must leave alone.

    What the policy asks of their arithmetic is done here.
    """
    holders = [module for module in block.modules() if isinstance(module, ExpertHolder)]
    alone = [holder for holder in holders if not isinstance(holder, FSDPModule)]
    if policy.param_dtype is not None:
        for experts in alone:
            assert isinstance(experts, Experts)
            experts.view = _narrowed(experts.view, policy.param_dtype)
    return {parameter for holder in alone for parameter in holder.parameters()}


def _narrowed(view: View, dtype: torch.dtype) -> View:
    def narrowed(parameter: Tensor) -> Tensor:
        return narrow(view(parameter), dtype)

    return narrowed


@seam
def shard_experts(
    block: nn.Module, mesh: DeviceMesh, num_loss_ranks: int, policy: MixedPrecisionPolicy
) -> None:
    """Shard the experts of a block over `mesh` and average their gradients over the ranks of the loss."""
    if mesh.size() == 1:
        return  # FSDP2 would copy them for every pass although nobody shares them
    for module in block.modules():
        # Placed experts are whole on each of their ranks, and reduced over those alone.
        if isinstance(module, ExpertHolder) and not module.row_blocks:
            sharded = fully_shard(module, mesh=mesh, mp_policy=policy)
            # The divisor of a sum over all tokens of the batch. FSDP2 would divide by the ranks of its own mesh, of
            # which there are num_loss_ranks * tp / (ep * etp).
            divisor = num_loss_ranks * module.gradient_share
            if divisor == mesh.size() or expert_divisor(mesh, num_loss_ranks) is not None:
                continue
            # A factor of its own is applied by NCCL's pre-multiplied sum, which gloo does not have; torch divides by
            # hand when told to sum (torch 2.11 to 2.13, _fsdp_collectives.py, _get_gradient_divide_factors).
            sharded.set_force_sum_reduction_for_comms(True)
            sharded.set_gradient_divide_factor(float(divisor))


def expert_divisor(mesh: DeviceMesh, num_loss_ranks: int) -> float | None:
    """Return what the experts' gradients must still be divided by after FSDP2, or None for nothing."""
    # On a mesh of (n, 1), copies without shards, `shard_experts` leaves FSDP2 its average over the n.
    return num_loss_ranks / mesh.size() if mesh.size(mesh.ndim - 1) == 1 else None


def _accumulation(root: FSDPModule, reshard: Reshard) -> Accumulate:
    @contextmanager
    def micro_batch(last: bool) -> Iterator[None]:
        root.set_requires_gradient_sync(last)
        if not reshard.after_backward:
            # What stays gathered now is found by the next forward pass; the optimizer is about to change the shards
            # after the last backward pass, so there it must go.
            root.set_reshard_after_backward(last)
        yield

    def accumulate(last: bool) -> AbstractContextManager[None]:
        return micro_batch(last)

    return accumulate
