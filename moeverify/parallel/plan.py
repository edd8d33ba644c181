"""Application of all parallelisms to a model, in a fixed order.

Layers are first divided into pipeline stages, and each stage is then parallelized like a separate model:
1. Expert sharding, which decides how a rank stores an expert.
2. Tensor parallelism and the tp side of MoE blocks.
3. Context parallelism.
4. Recomputation, which wraps the resulting blocks.
5. Data parallelism, which shards or replicates the rest.

DDP and FSDP1 take over existing values, so values are filled in before them. With FSDP2 they are filled in
afterwards, and each rank fills only its shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel

from moeverify.cases.axes.expert_placement import find_placement, is_placed
from moeverify.cases.schema import Layout
from moeverify.model.attention import Attention
from moeverify.model.attention_cores import ATTENTION
from moeverify.model.experts import ExpertHolder
from moeverify.model.transformer import Transformer
from moeverify.parallel import moe_tensor, tensor
from moeverify.parallel.collectives import sum_over
from moeverify.parallel.compile import COMPILE
from moeverify.parallel.context_parallel import CONTEXT_PARALLEL, apply_context_parallel
from moeverify.parallel.data_parallel import DATA_PARALLEL, DataRanks
from moeverify.parallel.ddp import Accumulate
from moeverify.parallel.dispatch import DISPATCH
from moeverify.parallel.expert import apply_expert_parallel
from moeverify.parallel.gradients import Reduction, add_shared, finalize_gradients
from moeverify.parallel.joined_gradients import join_gradients
from moeverify.parallel.meshes import Meshes
from moeverify.parallel.pipeline import ModelStage, Pipeline, Shapes, Stages, build_pipeline
from moeverify.parallel.placed_experts import PlacedExperts, place_experts
from moeverify.parallel.recompute import apply_recompute
from moeverify.parallel.regions.local_shard import LocalShard, parameters
from moeverify.parallel.regions.region import Indices
from moeverify.parallel.router_losses import ROUTER_LOSSES
from moeverify.seams import seam

Fill = Callable[[nn.Module], None]


@dataclass(frozen=True)
class Parallelized:
    """A model under a layout, and the operations that a training step needs around it.

    The loss of a rank is multiplied by `num_loss_ranks` before the backward pass, because gradients are
    averaged over that many ranks. `finalize` completes the gradients after the last backward pass. The
    gradient norm covers `counted`, which excludes shards that another pipeline stage counts, and the placed
    experts in `placed`.
    """

    model: nn.Module
    shards: Sequence[LocalShard]
    num_loss_ranks: int
    accumulate: Callable[[bool], AbstractContextManager[object]]
    loss_context: Callable[[], AbstractContextManager[object]]
    finalize: Callable[[], None]
    router_positions: Callable[[Indices], Indices]
    sum_over_shards: Callable[[Tensor], Tensor] | None
    own_router_losses: Callable[[], tuple[Tensor, Tensor]] | None = None
    counted: Sequence[LocalShard] = ()
    placed: Sequence[PlacedExperts] | None = None
    pipeline: Pipeline | None = None


def _each(last: bool) -> AbstractContextManager[object]:
    return nullcontext()


@seam
def parallelize(
    model: Transformer,
    layout: Layout,
    meshes: Meshes,
    device: torch.device,
    fill: Fill,
    compute: torch.dtype | None = None,
) -> Parallelized:
    """Return the model under the layout, with its values filled in; it must be on the meta device.

    `fill` is called once, with a model whose parameters are allocated on `device`. `compute` is the dtype
    of the arithmetic and defaults to the parameters' dtype; only FSDP2 supports a different one.
    Collective: all ranks.
    """
    placed = _shard_model(model, layout, meshes)
    # By name, not by parameter: data parallelism replaces the parameters.
    partial_names = _partial_names(model, layout)
    num_loss_ranks = meshes.size("loss")
    if layout.recompute:
        apply_recompute(model, layout.recompute)
    wrapped, accumulate = apply_data_parallel(model, layout, meshes, device, fill, compute)
    if layout.cp > 1:
        variant = CONTEXT_PARALLEL.find(layout.context_parallel)
        accumulate = variant.surround(accumulate, meshes.data["cp"], device)
    shards = parameters(wrapped)
    if layout.joined_micro_batches > 1:
        accumulate = join_gradients(model, layout.joined_micro_batches).surround(accumulate)
    reductions = list_reductions(wrapped, shards, layout, meshes, partial_names)
    counted = shards if placed is None else [shard for shard in shards if not placed.has(shard.tensor)]

    def finalize() -> None:
        finalize_gradients([shard.tensor for shard in counted], reductions)
        if placed is not None:
            placed.complete_gradients()

    return Parallelized(
        model=wrapped,
        shards=shards,
        counted=counted,
        placed=None if not is_placed(layout) else [placed] if placed is not None else [],
        num_loss_ranks=num_loss_ranks,
        accumulate=accumulate,
        loss_context=loss_parallel if layout.loss_parallel else nullcontext,
        finalize=finalize,
        router_positions=_router_positions(meshes) if layout.slices_tokens else _same,
        sum_over_shards=partial(sum_over, group=meshes.group("fsdp")) if _flat(layout, meshes) else None,
        own_router_losses=ROUTER_LOSSES.find(layout.router_losses).collect(
            model, num_loss_ranks * layout.micro_batches
        ),
    )


def parallelize_stages(
    stages: Sequence[ModelStage],
    shapes: Shapes,
    layout: Layout,
    meshes: Meshes,
    device: torch.device,
    fill: Fill,
) -> Parallelized:
    """Return the stages of this rank as one parallel model with a pipeline; they must be on meta.

    Collective: all ranks.
    """
    parts = [parallelize(stage, layout, meshes, device, fill) for stage in stages]
    shards = [shard for part in parts for shard in part.shards]
    # The norm counts a tied embedding once, on the first stage.
    tied = stages[-1].is_last and stages[-1].spec.tie_embedding
    copies = [shard for shard in parts[-1].shards if shard.name == TIED] if tied else []

    def finalize() -> None:
        for part in parts:
            part.finalize()
        if stages[0].spec.tie_embedding:
            sum_tied(shards, meshes)

    return replace(
        parts[0],
        model=Stages(stages),
        shards=shards,
        counted=[
            shard for part in parts for shard in part.counted if all(shard is not copy for copy in copies)
        ],
        placed=None if not is_placed(layout) else [each for part in parts for each in part.placed or ()],
        finalize=finalize,
        pipeline=build_pipeline(stages, layout, shapes, meshes.group("pp"), device),
    )


TIED = "embed.weight"


@seam
def sum_tied(shards: Sequence[LocalShard], meshes: Meshes) -> None:
    """Sum the gradients of a tied embedding over the first and the last stage."""
    copies = [shard.tensor for shard in shards if shard.name == TIED]
    if len(copies) == 2:
        add_shared(*copies)
    elif copies and meshes.ends is not None:
        finalize_gradients([], [Reduction(copies, meshes.ends)])


def _shard_model(model: Transformer, layout: Layout, meshes: Meshes) -> PlacedExperts | None:
    """Apply ep, etp, tp and cp; return the experts under an explicit placement, if any."""
    placed = _shard_experts(model, layout, meshes)
    if layout.expert_tp not in (1, layout.tp):
        moe_tensor.apply_gathered_slices(model, meshes.group("etp"))
    if layout.tp > 1:
        mesh = meshes.dense["tp"]
        apply = moe_tensor.apply_token_slices if layout.slices_tokens else moe_tensor.apply_expert_slices
        apply(model, mesh, sequence_parallel=layout.sequence_parallel)
        tensor.apply_tensor_parallel(
            model, mesh, sequence_parallel=layout.sequence_parallel, loss_parallel=layout.loss_parallel
        )
    for module in model.modules():
        if isinstance(module, Attention):
            module.core = ATTENTION.find(layout.attention).make_core()
    if layout.cp > 1:
        apply_context_parallel(model, layout.context_parallel, meshes.group("cp"))
    COMPILE.find(layout.compile).apply(model)
    return placed


def _shard_experts(model: Transformer, layout: Layout, meshes: Meshes) -> PlacedExperts | None:
    """Apply ep and etp."""
    placement = find_placement(layout, model.spec)
    if placement is not None:
        meshes.holders.make(placement)  # collective: ranks without MoE layers take part too
    expert_axes = [axis for axis in ("ep", "etp") if meshes.size(axis) > 1]
    if not expert_axes or not any(isinstance(module, ExpertHolder) for module in model.modules()):
        return None
    if placement is None:
        make = DISPATCH.find(layout.dispatch).find_maker()
        apply_expert_parallel(model, meshes.sparse[tuple(expert_axes)], make)
        return None
    layers = place_experts(model, placement, meshes.group("ep"))
    return PlacedExperts(layers, meshes.holders, meshes.size("loss"))


def _partial_names(model: Transformer, layout: Layout) -> dict[str, set[str]]:
    """Return, for each axis, the names of parameters whose gradients must be summed over it."""
    partial: dict[str, list[Tensor]] = {}
    if layout.tp > 1:
        partial["tp"] = tensor.partial_parameters(model, sequence_parallel=layout.sequence_parallel)
        partial["tp"] += moe_tensor.partial_parameters(model, tokens=layout.slices_tokens)
    if layout.expert_tp not in (1, layout.tp):
        partial["etp"] = moe_tensor.partial_biases(model)
    wanted = {axis: {id(parameter) for parameter in found} for axis, found in partial.items()}
    return {
        axis: {name for name, parameter in model.named_parameters() if id(parameter) in ids}
        for axis, ids in wanted.items()
    }


@seam
def apply_data_parallel(
    model: Transformer,
    layout: Layout,
    meshes: Meshes,
    device: torch.device,
    fill: Fill,
    compute: torch.dtype | None,
) -> tuple[nn.Module, Accumulate]:
    """Return the model under data parallelism, with its values, and its context for a micro-batch."""
    if meshes.size("loss") == 1:
        model.to_empty(device=device)
        fill(model)
        return model, _each
    ranks = DataRanks(layout, meshes, shard_mesh(meshes.dense, "fsdp"), _expert_mesh(meshes), device)
    return DATA_PARALLEL.find(layout.data_parallel).apply(model, ranks, fill, compute)


@seam
def shard_mesh(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """Return the mesh (axis), or (dp_replicate, axis) with replicas."""
    return mesh["dp_replicate", axis] if mesh["dp_replicate"].size() > 1 else mesh[axis]


def _expert_mesh(meshes: Meshes) -> DeviceMesh | None:
    """Return the mesh of copies or shards of one expert; None where neither ep nor etp shards experts."""
    if meshes.size("ep") * meshes.size("etp") == 1:
        return None
    axes = meshes.sparse.mesh_dim_names or ()
    return shard_mesh(meshes.sparse, "efsdp") if "efsdp" in axes else meshes.sparse["edp"]


def _flat(layout: Layout, meshes: Meshes) -> bool:
    return DATA_PARALLEL.find(layout.data_parallel).keeps_flat_shards and meshes.size("loss") > 1


@seam
def list_reductions(
    model: nn.Module,
    shards: Sequence[LocalShard],
    layout: Layout,
    meshes: Meshes,
    partial_names: Mapping[str, set[str]],
) -> list[Reduction]:
    """Return the reductions that no wrapper performs: over tp and etp, and for experts.

    `partial_names` lists, for each axis, the parameters to sum over it.
    """
    by_name = {shard.name: shard.tensor for shard in shards}
    reductions = [
        Reduction([by_name[name] for name in by_name if name in names], meshes.group(axis))
        for axis, names in partial_names.items()
    ]
    modules = [module for module in model.modules() if isinstance(module, ExpertHolder)]
    holders = [module for module in modules if not module.row_blocks]
    found = {id(parameter) for holder in holders for parameter in holder.parameters()}
    experts = [shard.tensor for shard in shards if id(shard.tensor) in found]
    # A package's own backward may have divided by this already (megablocks: 1/ep).
    share = holders[0].gradient_share if holders else 1.0
    return reductions + [
        replace(reduction, divisor=reduction.divisor * share)
        for reduction in expert_reductions(experts, layout, meshes)
    ]


@seam
def expert_reductions(experts: Sequence[Tensor], layout: Layout, meshes: Meshes) -> list[Reduction]:
    """Return the reductions that remain for experts sharded over ep or etp, after data parallelism."""
    mesh, num_loss_ranks = _expert_mesh(meshes), meshes.size("loss")
    if mesh is None:
        return []
    if num_loss_ranks == 1:  # without data parallelism, several tp ranks may still hold the same experts
        return [Reduction(experts, mesh.get_group())] if mesh.size() > 1 else []
    return DATA_PARALLEL.find(layout.data_parallel).complete_experts(experts, mesh, num_loss_ranks)


def _same(positions: Indices) -> Indices:
    return positions


def _router_positions(meshes: Meshes) -> Callable[[Indices], Indices]:
    return partial(moe_tensor.slice_positions, group=meshes.group("tp"))
