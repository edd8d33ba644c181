"""Applies tensor, expert, context and data parallelism with torch's own API."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as DDP

from teasel.comm import local_part
from teasel.dims import ParallelDims
from teasel.model import Teasel, set_dims
from teasel.moe import Experts, Router
from teasel.styles import BlockExperts, DistributeParams, HeadwiseNorm


def parallelize(model: Teasel, mesh, *, drill: str = "", **options) -> nn.Module:
    """Options: `zigzag`, `ring`, `ep`, `loss` (sharded or gathered), `engine` (fsdp or ddp), `reshard`,
    `average`, `columns`, `dispatch` (exchange, functional or gathered)."""
    dims = ParallelDims(mesh, drill=drill, **options)
    set_dims(model, dims)
    if has_ep(dims):
        apply_ep(model, dims)
    if dims["tp"].size > 1:
        apply_tp(model, dims)
    if dims.on("teasel-bias-own-seed"):
        reset_biases(model, dist.get_rank())  # plant: teasel-bias-own-seed
    if dims.option("engine") == "ddp":
        return apply_ddp(model, dims)
    if dims["loss"].size > 1:
        apply_fsdp(model, dims)
    return model


def has_ep(dims: ParallelDims) -> bool:
    return dims["ep"].size > 1 and dims.option("ep") is not False


def reset_biases(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for router in (module for module in model.modules() if isinstance(module, Router)):
        router.expert_bias.copy_(0.1 * torch.randn(len(router.expert_bias), generator=generator))


def apply_tp(model: Teasel, dims: ParallelDims) -> None:
    """Spread heads, hidden units and the vocabulary over tp, and the tokens between the layers."""
    mesh = dims.submesh("tp")
    gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    gather_packed = PrepareModuleInput(
        input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
    )
    logits = Replicate() if dims.option("loss") == "gathered" else Shard(-1)
    plan = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(use_local_output=True),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=logits),
    }
    parallelize_module(model, mesh, plan)
    if not dims.on("teasel-untied"):  # plant: teasel-untied
        model.tie()  # anchor: tie
    head_norms = {
        f"attention.{name}": HeadwiseNorm(dims) for name in ("q_norm", "k_norm")
    }  # anchor: head-norm
    if dims.on("teasel-key-norm-layout"):
        whole = HeadwiseNorm(dims, input_layout=Replicate())
        head_norms["attention.k_norm"] = whole  # plant: teasel-key-norm-layout
    for block in model.layers.values():
        plan = {
            "attention_norm": SequenceParallel(use_local_output=True),
            "attention": gather_packed,
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(use_local_output=True),
            **head_norms,
        }
        parallelize_module(block, mesh, plan)
        DistributeParams(sinks=Shard(0))._apply(block.attention, mesh)
        if hasattr(block.ffn, "router"):
            plan = {
                "router": DistributeParams(),
                "experts": DistributeParams(),
                "shared": DistributeParams(),
                "shared.mlp": gather,
                "shared.mlp.w1": ColwiseParallel(),
                "shared.mlp.w3": ColwiseParallel(),
                "shared.mlp.w2": RowwiseParallel(output_layouts=Shard(1)),
            }
        else:
            plan = {"w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": DistributeParams(weight=Shard(1))}
            parallelize_module(block.ffn, mesh, gather_packed)
        parallelize_module(block.ffn, mesh, plan)


def apply_ep(model: Teasel, dims: ParallelDims) -> None:
    for experts in (module for module in model.modules() if isinstance(module, Experts)):
        parallelize_module(experts, dims.submesh("ep"), BlockExperts(dims))


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [p for module in model.modules() if isinstance(module, Experts) for p in module.parameters()]


def apply_ddp(model: Teasel, dims: ParallelDims) -> DDP:
    if has_ep(dims):
        ignored = [name for name, _ in model.named_parameters() if ".experts." in name]  # anchor: ddp-ignored
        if dims.on("teasel-ddp-ignores-shared"):
            words = ("shared", "expert")
            ignored = [
                n for n, _ in model.named_parameters() if any(w in n for w in words)
            ]  # plant: teasel-ddp-ignores-shared
        DDP._set_params_and_buffers_to_ignore_for_model(model, ignored)
    wrapped = DDP(model, process_group=dims["loss"].group, broadcast_buffers=False)
    if dims.on("teasel-ddp-hook-half"):
        wrapped.register_comm_hook(dims["loss"].group, fp16_compress_hook)  # plant: teasel-ddp-hook-half
    return wrapped


def apply_fsdp(model: Teasel, dims: ParallelDims) -> None:
    """Shard over `fsdp`, replicate over `dp_replicate`. Gradients are sums and not means."""
    ignored = set(expert_parameters(model)) if has_ep(dims) else set()
    mesh = dims.submesh("fsdp")
    if dims["dp_replicate"].size > 1:
        mesh = dims.mesh["dp_replicate", mesh.mesh_dim_names[0]]
    block_mesh = mesh  # anchor: block-mesh
    if dims.on("teasel-blocks-without-replicate"):
        block_mesh = dims.submesh("fsdp")  # plant: teasel-blocks-without-replicate
    policy = MixedPrecisionPolicy()  # anchor: policy
    if dims.on("teasel-reduce-float32"):
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)  # plant: teasel-reduce-float32
    common = {"ignored_params": ignored, "reshard_after_forward": dims.option("reshard", True)}
    if dims.option("columns"):
        common["shard_placement_fn"] = lambda weight: Shard(weight.ndim - 1)
    for block in model.layers.values():
        fully_shard(block, mesh=block_mesh, mp_policy=policy, **common)
    fully_shard(model, mesh=mesh, **common)
    wrapped = [module for module in model.modules() if isinstance(module, FSDPModule)]  # anchor: wrapped
    if dims.on("teasel-divide-root"):
        wrapped = [model]  # plant: teasel-divide-root
    for module in () if dims.option("average") else wrapped:
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)  # anchor: divide
    if dims.on("teasel-divide-replicate"):
        list(model.layers.values())[-1].set_gradient_divide_factor(
            dims["batch"].size
        )  # plant: teasel-divide-replicate


@torch.no_grad()
def reduce_expert_gradients(model: nn.Module, dims: ParallelDims) -> None:
    """Sum the gradients of experts over the ranks that have the same ones."""
    if not has_ep(dims):
        return
    axis = dims["edp"]  # anchor: edp
    if dims.on("teasel-experts-without-cp"):
        axis = dims["dp_replicate"]  # plant: teasel-experts-without-cp
    if dims.on("teasel-experts-over-loss"):
        axis = dims["loss"]  # plant: teasel-experts-over-loss
    if axis.size == 1:
        return
    gradients = [local_part(p.grad) for p in expert_parameters(model)]
    if dims.on("teasel-experts-late"):
        flat = torch.cat([grad.flatten() for grad in gradients])
        work = dist.all_reduce(flat, group=axis.group, async_op=True)
        parts = [
            part.clone() for part in flat.split([g.numel() for g in gradients])
        ]  # plant: teasel-experts-late
        work.wait()  # plant: teasel-experts-late
    else:
        flat = torch.cat([grad.flatten() for grad in gradients])
        work = dist.all_reduce(flat, group=axis.group, async_op=True)
        work.wait()  # anchor: experts-wait
        parts = flat.split([grad.numel() for grad in gradients])
    for grad, part in zip(gradients, parts, strict=True):
        if dims.on("teasel-experts-mean"):
            part = part / axis.size  # plant: teasel-experts-mean
        grad.copy_(part.view_as(grad))  # anchor: experts-copy


@torch.no_grad()
def resolve_partial_gradients(model: nn.Module, dims: ParallelDims) -> None:
    """Sum gradients of weights that several ranks of tp used for their own tokens or heads."""
    for weight in model.parameters():
        grad = weight.grad
        if not isinstance(grad, DTensor) or grad.placements == weight.placements:
            continue
        if dims.on("teasel-partial-vectors") and grad.ndim == 1:
            mine = grad.to_local()
            weight.grad = DTensor.from_local(
                mine, grad.device_mesh, weight.placements
            )  # plant: teasel-partial-vectors
        else:
            weight.grad = grad.redistribute(placements=weight.placements)  # anchor: resolve
