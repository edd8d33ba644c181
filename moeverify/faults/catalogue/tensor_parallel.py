"""Tensor and sequence parallelism: gradients of replicated parameters, and of gathered tensors.

Class J. A norm that sees a slice of positions or of heads has a partial gradient. A gather may sum
gradients that are already complete.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moeverify.faults.fault import fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from moeverify.cases.schema import Layout
    from moeverify.model.transformer import Transformer
    from moeverify.parallel.gradients import Reduction
    from moeverify.parallel.meshes import Meshes
    from moeverify.parallel.regions.local_shard import LocalShard


@fault(
    "J01",
    title="the gradient of the head's input is not reduced over tp",
    source="pytorch/torchtitan PR #3412 (c2a3771a4)",
    mechanism="the partial gradient of a chunk of the loss is stored under the label of a replica",
    trigger="tp with a loss on sharded logits",
    case=make_case("j01", preset="tiny-gpt", tp=2, loss_parallel=True),
    where=(At(axis="tp"),),
    causes=(Cause.MISSING_REDUCTION,),
    is_moe=False,
)
def j01_partial_under_replicate(patch: Patch) -> None:
    """Multiply plain local tensors in the head, so that its input's gradient counts as replicated."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Shard
    from torch.nn import functional

    from moeverify.parallel.tensor import apply_tensor_parallel

    @patch.wrap(apply_tensor_parallel)
    def use_plain_head(original: Original[None], model: Transformer, mesh: DeviceMesh, **named: bool) -> None:
        original(model, mesh, **named)
        head = model.lm_head
        assert head is not None

        def multiply(x: DTensor) -> Tensor:
            assert isinstance(head.weight, DTensor)
            logits = functional.linear(x.to_local(), head.weight.to_local())
            return DTensor.from_local(logits, mesh, [Shard(-1)], run_check=False)

        head.forward = multiply


TP = 2


@fault(
    "J04",
    title="the loss is too large by the logarithm of tp",
    source="NVIDIA/Megatron-LM issue #7452, item 2",
    mechanism="the parallel cross entropy runs on logits that have been gathered already",
    trigger="tp with gathered logits",
    case=make_case("j04", preset="tiny-gpt", tp=TP),
    where=(At(name="lm"), At(name="sum_again"), At(axis="tp"), At(term="lm")),
    causes=(Cause.FORWARD, Cause.METRIC),
    is_moe=False,
)
def j04_loss_of_gathered_logits(patch: Patch) -> None:
    """Compute the loss as if each tp rank had its own part of the vocabulary."""
    import torch.distributed as dist

    from moeverify.train.data import IGNORED
    from moeverify.train.forward import cross_entropy

    @patch.replace(cross_entropy)
    def sum_again(logits: Tensor, targets: Tensor) -> Tensor:
        # The sum of exponentials is TP times too large. The target's logit is on rank 0 only, like a
        # shard's.
        total = logits.logsumexp(dim=-1)
        shared = total.detach() + (total - total.detach()) / TP + math.log(TP)
        chosen = logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        target = chosen if dist.get_rank() == 0 else chosen.detach()
        return (shared - target) * (targets != IGNORED)


@fault(
    "J07",
    title="sequence-parallel norms lose their reduction",
    source="InternLM/InternEvo PR #53 (663ef2e), PR #534 (432bd5e)",
    mechanism="the hook that sums the gradients of norms over tp is attached in one branch of the overlap modes only",
    trigger="tp with sequence parallelism",
    case=make_case("j07", preset="tiny-gpt", tp=2, sequence_parallel=True),
    where=(At(name="*norm.weight", axis="tp"), At(name="*norm.bias", axis="tp")),
    causes=(Cause.MISSING_REDUCTION,),
    is_moe=False,
)
def j07_norms_outside_the_mode(patch: Patch) -> None:
    """Mark the norms of the residual stream as without sequence parallelism."""
    from moeverify.parallel.tensor import partial_parameters

    @patch.wrap(partial_parameters)
    def forget_stream_norms(
        original: Original[list[Tensor]], model: Transformer, *, sequence_parallel: bool
    ) -> list[Tensor]:
        return original(model, sequence_parallel=False)


@fault(
    "J08",
    title="gradients of sequence-parallel norms are tp times too small",
    source="EleutherAI/gpt-neox PR #1259",
    mechanism="the hook that all-reduces the gradients of norms averages over tp instead of summing",
    trigger="tp with sequence parallelism",
    case=make_case("j08", preset="tiny-gpt", tp=2, sequence_parallel=True),
    where=(At(name="*norm.weight"), At(name="*norm.bias")),
    causes=(Cause.SCALE,),
    is_moe=False,
)
def j08_averaged_norms(patch: Patch) -> None:
    """Divide the gradients that are summed over tp by the tp degree."""
    from moeverify.parallel.plan import list_reductions

    @patch.wrap(list_reductions)
    def average_over_tp(
        original: Original[list[Reduction]],
        model: nn.Module,
        shards: Sequence[LocalShard],
        layout: Layout,
        meshes: Meshes,
        partial_names: Mapping[str, set[str]],
    ) -> list[Reduction]:
        found = original(model, shards, layout, meshes, partial_names)
        return [
            replace(item, divisor=float(layout.tp)) if item.group is meshes.group("tp") else item
            for item in found
        ]


@fault(
    "J09",
    title="norms of query and key heads miss their sum over tp",
    source="NVIDIA-NeMo/RL #3716",
    mechanism="forward, backward and step are called one by one, and finalize_model_grads is not among them",
    trigger="tp with norms of query and key heads",
    case=make_case("j09", preset="tiny-gpt", model={"qk_norm": True}, tp=2, sequence_parallel=True),
    where=(At(name="*norm.weight", axis="tp"), At(name="*norm.bias", axis="tp")),
    causes=(Cause.MISSING_REDUCTION,),
    is_moe=False,
)
def j09_gradients_not_finalized(patch: Patch) -> None:
    """Skip all reductions after the last backward pass."""
    from moeverify.parallel.gradients import finalize_gradients

    @patch.wrap(finalize_gradients)
    def reduce_nothing(
        original: Original[None], parameters: Sequence[Tensor], reductions: Sequence[Reduction]
    ) -> None:
        original(parameters, [])


@fault(
    "J10",
    title="the gradients of latent projections are reduced over tp twice",
    source="inclusionAI/AReno PR #496",
    mechanism="the gradient of a replicated projection and that of its input are both summed, though a part of "
    "it is complete",
    trigger="tp with latent attention, no sequence parallelism",
    case=make_case("j10", preset="tiny-deepseek-v2-lite", tp=2, sequence_parallel=False),
    where=(At(name="*kv_a_proj*"), At(axis="tp"), At(name="*.attention")),
    causes=(Cause.MISSING_REDUCTION, Cause.SCALE),
)
def j10_latents_reduced_twice(patch: Patch) -> None:
    """Sum the gradient of kv_a_proj over tp: rows of the latent are complete, rotary ones partial."""
    from moeverify.model.mla import LatentAttention
    from moeverify.model.param_access import identity
    from moeverify.parallel.tensor import apply_tensor_parallel, partial_parameters

    @patch.wrap(apply_tensor_parallel)
    def share_without_sum(
        original: Original[None], model: Transformer, mesh: DeviceMesh, **named: bool
    ) -> None:
        original(model, mesh, **named)
        for module in model.modules():
            if isinstance(module, LatentAttention):
                module.share = identity

    @patch.wrap(partial_parameters)
    def add_latents(
        original: Original[list[Tensor]], model: Transformer, *, sequence_parallel: bool
    ) -> list[Tensor]:
        found = original(model, sequence_parallel=sequence_parallel)
        heads = [module for module in model.modules() if isinstance(module, LatentAttention)]
        return [*found, *(module.kv_a_proj.weight for module in heads)]


@fault(
    "J11",
    title="norms inside attention miss their sum over tp",
    source="NVIDIA/Megatron-LM #7452, item 11",
    mechanism="a replicated norm that sees the heads of one rank is marked for reduction by sequence_parallel alone",
    trigger="tp without sequence parallelism",
    case=make_case("j11", preset="tiny-gpt", model={"qk_norm": True}, tp=2),
    where=(At(name="*.[qk]_norm.weight", axis="tp"),),
    causes=(Cause.MISSING_REDUCTION,),
    is_moe=False,
    notes="upstream's norm was that of a gated delta net's outputs; here those of query and key heads",
)
def j11_head_norms_without_sequence_parallel(patch: Patch) -> None:
    """Mark no norm for the sum over tp if sequence parallelism is off."""
    from moeverify.parallel.tensor import partial_parameters

    @patch.wrap(partial_parameters)
    def forget_head_norms(
        original: Original[list[Tensor]], model: Transformer, *, sequence_parallel: bool
    ) -> list[Tensor]:
        return original(model, sequence_parallel=sequence_parallel) if sequence_parallel else []


@fault(
    "J12",
    title="the gradient of gathered logits is all-reduced once too often",
    source="pytorch/torchtitan PR #3822 (5aefc0229)",
    mechanism="the all-gather is typed as a value that each rank uses in its own way, so its backward sums over tp",
    trigger="tp with a loss on gathered logits",
    case=make_case("j12", preset="tiny-gpt", tp=2),
    where=(At(axis="tp"), At(name="lm_head*")),
    causes=(Cause.SCALE,),
    is_moe=False,
)
def j12_gathered_logits_summed_backward(patch: Patch) -> None:
    """Sum the gradient of the whole logits over tp."""
    from moeverify.parallel.collectives import copy_to
    from moeverify.parallel.tensor import apply_tensor_parallel

    @patch.wrap(apply_tensor_parallel)
    def sum_logit_gradients(
        original: Original[None],
        model: Transformer,
        mesh: DeviceMesh,
        *,
        sequence_parallel: bool,
        loss_parallel: bool,
    ) -> None:
        original(model, mesh, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)

        def use_as_different(_: nn.Module, inputs: tuple[Tensor, ...], logits: Tensor) -> Tensor:
            return copy_to(logits, mesh.get_group())

        assert model.lm_head is not None
        model.lm_head.register_forward_hook(use_as_different)


@fault(
    "J13",
    title="all tokens get the gradient weight of the first",
    source="NVIDIA-NeMo/Automodel PR #3853",
    mechanism="a kernel of the loss without reduction takes the first incoming gradient for all tokens",
    trigger="tokens of unequal weight",
    case=make_case("j13", preset="tiny-gpt", tp=2),
    where=(At(name="lm_head*"), At(name="backward"), At(term="lm")),
    causes=(Cause.PADDING,),
    is_moe=False,
    notes="weights are the mask of padding",
)
def j13_weight_of_first_token(patch: Patch) -> None:
    """Mask the token losses outside of a kernel that uses the first token's gradient for all."""
    import torch
    from torch.nn import functional

    from moeverify.train.data import IGNORED
    from moeverify.train.forward import cross_entropy

    class _Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
            ctx.save_for_backward(logits.softmax(dim=-1), targets)
            return functional.cross_entropy(logits, targets, reduction="none")

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            shares, targets = ctx.saved_tensors
            return (shares - functional.one_hot(targets, shares.shape[-1])) * grad[0], None

    @patch.replace(cross_entropy)
    def mask_outside(logits: Tensor, targets: Tensor) -> Tensor:
        flat: Tensor = _Kernel.apply(logits.flatten(0, 1), targets.clamp(min=0).flatten())  # type: ignore[no-untyped-call]
        return flat.view(targets.shape) * (targets != IGNORED)


@fault(
    "J14",
    title="the key norm's backward does not wait for the gradient of the keys",
    source="ByteDance-Seed/VeOmni PR #419",
    mechanism="the norm's backward runs before the asynchronous all-to-all of the keys' gradient is waited for",
    trigger="Ulysses with asynchronous exchanges and a key norm",
    case=make_case("j14", preset="tiny-gpt", model={"qk_norm": True}, cp=2, context_parallel="alltoall"),
    where=(At(name="*.attention*"),),
    causes=(Cause.BACKWARD,),
    is_moe=False,
    notes="upstream read whatever the buffer held; here that is zeros, so that the fault is the same in each run",
)
def j14_key_gradient_before_arrival(patch: Patch) -> None:
    """Zero the parts of the keys' gradient that other ranks send."""
    import torch
    from torch.autograd import Function

    from moeverify.parallel.context_parallel.alltoall import AllToAllCore

    class OwnHeads(Function):
        """Identity on the keys; of their gradient only the local heads are kept."""

        @staticmethod
        def forward(ctx: Any, keys: Tensor, group: ProcessGroup) -> Tensor:
            ctx.group = group
            return keys.view_as(keys)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            parts = list(grad.chunk(ctx.group.size(), dim=2))
            present = ctx.group.rank()
            arrived = [part if r == present else torch.zeros_like(part) for r, part in enumerate(parts)]
            return torch.cat(arrived, dim=2), None

    @patch.wrap(AllToAllCore.__call__)
    def attend_early(
        original: Original[Tensor], self: AllToAllCore, q: Tensor, k: Tensor, v: Tensor, positions: Tensor
    ) -> Tensor:
        early: Tensor = OwnHeads.apply(k, self.group)  # type: ignore[no-untyped-call]
        return original(self, q, early, v, positions)
