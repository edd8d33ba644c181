"""Tensor parallelism for everything but the routed experts, by torch's own styles.

Between modules the residual stream is a plain tensor. It is whole on every rank of the tp axis, or the
rank's slice of the positions with sequence parallelism (Korthikanti et al., arXiv 2205.05198).

Placement on tp: projections into heads or hidden units are Shard(0), projections back Shard(1), embedding
and head Shard(0) over the vocabulary. tp need not divide the vocabulary V: shards have ceil(V / tp) rows
and the last one has the rest, for example 25129 and 25128 of 50257. Norms stay replicated plain parameters.
A parameter that processes only part of the tokens or heads has a gradient that must be summed over tp
(`partial_parameters`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from moeverify.model.mla import LatentAttention
from moeverify.model.mlp import MLP
from moeverify.model.norm import RMSNorm
from moeverify.model.transformer import TiedHead, Transformer, TransformerBlock
from moeverify.parallel.collectives import copy_to, reduce_from
from moeverify.parallel.float8 import columns, rows
from moeverify.seams import seam


@seam
def apply_tensor_parallel(
    model: Transformer, mesh: DeviceMesh, *, sequence_parallel: bool, loss_parallel: bool
) -> None:
    """Shard embedding, attention, dense MLPs and head over the one axis of `mesh`.

    With `loss_parallel` the logits are a DTensor, Shard(-1), for
    `torch.distributed.tensor.parallel.loss_parallel`. Without it they are whole on every rank.
    """
    stream: Placement = Shard(1) if sequence_parallel else Replicate()
    if model.embed is not None:
        style = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
        parallelize_module(model.embed, mesh, style)
    for block in model.layers.values():
        assert isinstance(block, TransformerBlock)
        _parallelize_attention(block, mesh, stream)
        if block.mlp is not None:
            parallelize_mlp(block.mlp, mesh, stream)
    logits: Placement = Shard(-1) if loss_parallel else Replicate()
    # A tied head has no parameter of its own, so ColwiseParallel has nothing to shard.
    if isinstance(model.lm_head, TiedHead):
        _parallelize_tied_head(model.lm_head, mesh, stream, logits)
    elif model.lm_head is not None:
        style_out = ColwiseParallel(
            input_layouts=stream, output_layouts=logits, use_local_output=not loss_parallel
        )
        parallelize_module(model.lm_head, mesh, style_out)


def parallelize_mlp(mlp: MLP, mesh: DeviceMesh, stream: Placement) -> None:
    """Shard a dense MLP over its hidden units; its input and output are placed as `stream`."""
    plan: dict[str, Any] = {
        "": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),)),
        "up_proj": columns(mlp.up_proj),
        "down_proj": rows(mlp.down_proj, stream),
    }
    if mlp.gate_proj is not None:
        plan["gate_proj"] = columns(mlp.gate_proj)
    _apply(mlp, mesh, plan)


def _parallelize_attention(block: TransformerBlock, mesh: DeviceMesh, stream: Placement) -> None:
    if isinstance(block.attention, LatentAttention):
        _parallelize_latent(block.attention, mesh, stream)
        return
    if not block.attention.norms_heads:
        for norm in (block.attention.q_norm, block.attention.k_norm):
            if norm is not None:
                _spread_norm(norm, mesh.get_group())
    # Positions, the second input, are identical on all ranks and a plain tensor. Each rank has whole heads,
    # so views of projection outputs (B, S, N * D) as (B, S, N, D) work on local tensors.
    plan: dict[str, Any] = {
        "": PrepareModuleInput(input_layouts=(stream, None), desired_input_layouts=(Replicate(), None)),
        "q_proj": columns(block.attention.q_proj),
        "k_proj": columns(block.attention.k_proj),
        "v_proj": columns(block.attention.v_proj),
        "o_proj": rows(block.attention.o_proj, stream),
    }
    _apply(block.attention, mesh, plan)


def _parallelize_latent(attention: LatentAttention, mesh: DeviceMesh, stream: Placement) -> None:
    """Shard latent attention over its heads; every rank computes the latents of all positions.

    Projections from a latent into heads sum their input gradient over tp, and so does `share` for the key
    part common to all heads. Everything before them is computed identically on every rank, including
    gradients, and needs no sum.
    """
    whole: Placement = Replicate()
    into_heads = "q_proj" if attention.q_proj is not None else "q_b_proj"
    plan: dict[str, Any] = {
        "": PrepareModuleInput(
            input_layouts=(stream, None), desired_input_layouts=(whole, None), use_local_output=True
        ),
        into_heads: columns(attention.get_submodule(into_heads)),
        "kv_b_proj": columns(attention.kv_b_proj),
        "o_proj": rows(attention.o_proj, stream),
    }
    _apply(attention, mesh, plan)
    attention.share = partial(copy_to, group=mesh.get_group())


def _spread_norm(norm: RMSNorm, group: ProcessGroup) -> None:
    """Make a norm over all heads use the mean over all ranks and this rank's slice of the weight."""

    # The mean of squares over all heads, (B, S, 1), is the mean of the ranks' means, because all ranks have
    # equally many heads.
    def average(mean: Tensor) -> Tensor:
        return copy_to(reduce_from(mean, group), group) / group.size()

    def view(weight: Tensor) -> Tensor:
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        return local.chunk(group.size())[group.rank()]

    norm.average, norm.view = average, view


def _apply(module: nn.Module, mesh: DeviceMesh, plan: dict[str, Any]) -> None:
    """Apply a plan in which the empty name is the module itself."""
    parallelize_module(module, mesh, {name: style for name, style in plan.items() if name})
    parallelize_module(module, mesh, plan[""])


def _parallelize_tied_head(head: TiedHead, mesh: DeviceMesh, stream: Placement, logits: Placement) -> None:
    def prepare(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        x = DTensor.from_local(inputs[0], mesh, [stream], run_check=False)
        return (x.redistribute(placements=[Replicate()]),)

    def finish(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        placed = output.redistribute(placements=[logits])
        return placed if isinstance(logits, Shard) else placed.to_local()

    distribute_module(head, mesh, None, prepare, finish)


@seam
def partial_parameters(model: Transformer, *, sequence_parallel: bool) -> list[Tensor]:
    """Return the parameters outside MoE blocks whose gradient on each tp rank is an unreduced partial sum.

    The query and key norms process the heads of one rank. With sequence parallelism, the norms of the
    residual stream process the positions of one rank.
    """
    found: list[Tensor] = []
    for block in model.layers.values():
        assert isinstance(block, TransformerBlock)
        heads = block.attention
        norms = () if isinstance(heads, LatentAttention) else (heads.q_norm, heads.k_norm)
        for norm in norms:
            found += list(norm.parameters()) if norm is not None else []
        if sequence_parallel:
            found += [*block.attention_norm.parameters(), *block.ffn_norm.parameters()]
    if sequence_parallel and model.norm is not None:
        found += list(model.norm.parameters())
    return found
