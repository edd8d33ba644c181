"""Fully sharded data parallelism by FSDP2, with experts on a separate mesh.

Placement: every parameter is Shard(0) on fsdp and Replicate on dp_replicate, after tp, ep and etp sharding.

Gradients outside the experts are averaged over dp_replicate * fsdp, which is the number of ranks that the
loss is split over. Each expert is held by dp_replicate * efsdp ranks, but its gradient contains the tokens
of all loss ranks. Expert gradients are therefore divided by the number of loss ranks, not by the size of
the expert mesh (pytorch #160285).

FSDP2 does not wrap experts that no two ranks share; their gradients are divided at the end. With copies but
no shards (efsdp of 1), torch 2.13 applies a custom divide factor twice in float64 and fp16. In this case
FSDP2 averages over its mesh, and `expert_divisor` gives the remaining divisor.

Mixed precision: FSDP2 gathers in the narrow dtype and widens gradients before it reduces them. Experts that
FSDP2 does not wrap also compute with narrow copies, and their gradients arrive widened.
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

    `mesh` is (fsdp) or (dp_replicate, fsdp). `expert_mesh` is the corresponding mesh of the sparse view,
    for experts that are already sharded over ep or etp. It is None where experts are like any other
    parameter. `num_loss_ranks` is the number of ranks that the loss is averaged over.
    """
    whole: set[nn.Parameter] = set()
    for block in model.layers.values():
        if expert_mesh is not None:
            # Shard experts first, on their own mesh: `fully_shard` takes only parameters that no submodule
            # has taken.
            shard_experts(block, expert_mesh, num_loss_ranks, policy)
            whole |= _leave_alone(block, policy)
        fully_shard(block, mesh=mesh, ignored_params=whole, mp_policy=policy)
    root = fully_shard(model, mesh=mesh, ignored_params=whole, mp_policy=policy)
    if not reshard.after_forward:
        root.set_reshard_after_forward(False)
    return _accumulation(root, reshard)


@seam
def choose_policy(model: nn.Module, compute: torch.dtype | None) -> MixedPrecisionPolicy:
    """Return the policy that computes in dtype `compute` and reduces gradients in the parameters' dtype.

    Without `compute`, FSDP2 computes in the parameters' dtype.
    """
    stored = next(model.parameters()).dtype
    if compute is None or compute == stored:
        return AS_STORED
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=stored)


def keep_gathered(model: nn.Module) -> None:
    """Keep the gathered parameters of a pipeline stage from one micro-batch to the next.

    Zero-bubble schedules need this. torch looks up the parameters of a stage before the backward pass
    gathers them, and silently computes no gradient for parameters that it does not find.
    """
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_forward(False)


def _leave_alone(block: nn.Module, policy: MixedPrecisionPolicy) -> set[nn.Parameter]:
    """Return the expert parameters that FSDP2 must not shard; apply the policy's compute dtype here."""
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
        return  # FSDP2 would copy them for every pass although no rank shares them
    for module in block.modules():
        # Placed experts are whole on each of their ranks and reduced only over those ranks.
        if isinstance(module, ExpertHolder) and not module.row_blocks:
            sharded = fully_shard(module, mesh=mesh, mp_policy=policy)
            # The gradient is a sum over all tokens of the batch. FSDP2 would divide by the size of its own
            # mesh, which is num_loss_ranks * tp / (ep * etp).
            divisor = num_loss_ranks * module.gradient_share
            if divisor == mesh.size() or expert_divisor(mesh, num_loss_ranks) is not None:
                continue
            # torch applies a custom divide factor by NCCL's pre-multiplied sum, which gloo lacks. With a
            # forced sum reduction torch divides explicitly (torch 2.11 to 2.13, _fsdp_collectives.py,
            # _get_gradient_divide_factors).
            sharded.set_force_sum_reduction_for_comms(True)
            sharded.set_gradient_divide_factor(float(divisor))


def expert_divisor(mesh: DeviceMesh, num_loss_ranks: int) -> float | None:
    """Return the divisor still to apply to the experts' gradients after FSDP2, or None if there is none."""
    # On a mesh of (n, 1), with copies but no shards, `shard_experts` keeps FSDP2's average over the n
    # ranks.
    return num_loss_ranks / mesh.size() if mesh.size(mesh.ndim - 1) == 1 else None


def _accumulation(root: FSDPModule, reshard: Reshard) -> Accumulate:
    @contextmanager
    def micro_batch(last: bool) -> Iterator[None]:
        root.set_requires_gradient_sync(last)
        if not reshard.after_backward:
            # Parameters that stay gathered are reused by the next forward pass. After the last backward
            # pass they must be freed, because the optimizer changes the shards.
            root.set_reshard_after_backward(last)
        yield

    def accumulate(last: bool) -> AbstractContextManager[None]:
        return micro_batch(last)

    return accumulate
