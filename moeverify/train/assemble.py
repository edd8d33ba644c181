"""Assembly of this rank's program from a recipe, for a single device or for a layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

from moeverify.cases.axes.expert_placement import find_placement, list_exchanges
from moeverify.cases.axes.groups import find_source
from moeverify.cases.axes.split import split_rows
from moeverify.cases.schema import Layout, Precision, Recipe, ReferenceModel
from moeverify.errors import CaseError, Problem
from moeverify.model.init import initial_values
from moeverify.model.mixed_precision import narrow_model
from moeverify.model.transformer import Transformer
from moeverify.parallel.collectives import sum_over
from moeverify.parallel.context_parallel import split_positions
from moeverify.parallel.float8 import apply_float8
from moeverify.parallel.gradients import finalize_gradients
from moeverify.parallel.graphs import GRAPHS
from moeverify.parallel.meshes import Meshes
from moeverify.parallel.pipeline import Shapes, build_stages
from moeverify.parallel.plan import Fill, parallelize, parallelize_stages
from moeverify.parallel.regions.local_shard import LocalShard, buffers, parameters
from moeverify.parallel.regions.region import as_indices
from moeverify.parallel.regions.unseen import unseen
from moeverify.parallel.wrapper import accumulate, keeps_flat_shards
from moeverify.seams import seam
from moeverify.tools.placement.policy import Policy
from moeverify.train.clipping import are_plain_tensors_everywhere, count_regions_once
from moeverify.train.custom_step import CustomStep
from moeverify.train.data import Share, whole_share
from moeverify.train.engine import PlainEngine, PreparedEngine
from moeverify.train.initial_weights import load_initial
from moeverify.train.micro_batch_graph import MicroBatchGraphs
from moeverify.train.objective import GroupSums
from moeverify.train.optimizer import build_model_optimizer
from moeverify.train.parallelize_custom import MESH_AXES, ParallelizedCustomModel, parallelize_custom
from moeverify.train.program import RunMicroBatches, TrainingProgram, compute_dtype_of, dtype_of
from moeverify.train.rebalancing import Rebalancing
from moeverify.train.routers import find_routers
from moeverify.train.subjects import subject_of


def assemble_single(
    recipe: Recipe, device: torch.device, *, compute: Precision | None = None, share: Share | None = None
) -> TrainingProgram:
    """Return the program of a single device, which runs no parallel code.

    `compute` is the precision of the arithmetic and defaults to the recipe's. Initial values are always
    rounded to the recipe's precision. `share` may reorder the rows of the batch and must contain all of
    them.
    """
    subject, precision = subject_of(recipe), compute or recipe.precision
    model = subject.build(device, dtype_of(precision))
    fill_initial(recipe, model)
    if compute_dtype_of(precision) != dtype_of(precision):
        narrow_model(model, compute_dtype_of(precision))
    return TrainingProgram(
        subject=subject,
        model=model,
        shards=parameters(model),
        buffers=buffers(model),
        routers=find_routers(model),
        share=share or whole_share(recipe.data),
        device=device,
        custom_step=None if recipe.step is None else CustomStep(recipe.step),
    )


def assemble_parallel(
    recipe: Recipe, layout: Layout, meshes: Meshes, device: torch.device, *, fill: Fill | None = None
) -> TrainingProgram:
    """Return this rank's program under a layout. Collective: all ranks of the layout.

    `moeverify.parallel.plan` parallelizes the reference model. `moeverify.train.parallelize_custom` handles
    a user's model, and any model if the layout names a `parallelize` function. `fill` replaces the initial
    values of the reference model, which default to the recipe's.
    """
    spec = recipe.model.reference
    if spec is None or layout.parallelize is not None:
        return _assemble_custom(recipe, layout, meshes, device)
    subject, dtype = subject_of(recipe), dtype_of(recipe.precision)
    fill = fill or partial(fill_initial, recipe)
    if layout.pp == 1:
        model = Transformer(spec, experts=layout.experts, dtype=dtype, device="meta")
        apply_float8(model, recipe.float8, device, compute_dtype_of(recipe.precision))
        done = parallelize(model, layout, meshes, device, fill, compute_dtype_of(recipe.precision))
    else:
        rank = meshes.coordinate("pp")
        stages = build_stages(spec, layout, rank, experts=layout.experts, dtype=dtype)
        for stage in stages:
            apply_float8(stage, recipe.float8, device, dtype)
        done = parallelize_stages(stages, shapes_of(recipe, layout), layout, meshes, device, fill)
    routers = [replace(view, positions=done.router_positions) for view in find_routers(done.model)]
    return TrainingProgram(
        subject=subject,
        model=done.model,
        shards=done.shards,
        buffers=buffers(done.model),
        routers=routers,
        share=share_of(recipe, layout, meshes),
        device=device,
        sums=sums_of(layout, meshes),
        scale=float(done.num_loss_ranks),
        num_micro_batches=layout.micro_batches,
        optimizer_implementation=layout.optimizer,
        accumulate=done.accumulate,
        loss_context=done.loss_context,
        finalize=done.finalize,
        sum_over_shards=done.sum_over_shards,
        own_router_losses=done.own_router_losses,
        sum_over_stages=partial(sum_over, group=meshes.group("pp")) if layout.pp > 1 else None,
        counted=done.counted,
        placed=done.placed,
        exchanges=list_exchanges(layout, spec),
        rebalancing=_make_rebalancing(layout, spec),
        holders=meshes.holders,
        pipeline=done.pipeline,
        run_captured=_capture_micro_batches(layout, device),
    )


def _capture_micro_batches(layout: Layout, device: torch.device) -> RunMicroBatches | None:
    """Return a function that runs micro-batches as CUDA graphs, or None if the layout does not use graphs.

    Raises: CaseError when the collectives of GPUs pass through the host, which a graph cannot capture.
    """
    if not GRAPHS.find(layout.graphs).is_captured:
        return None
    if device.type == "cuda" and layout.world_size > 1 and "nccl" not in dist.get_backend():
        message = f"a graph cannot hold the collectives of {dist.get_backend()}"
        raise CaseError([Problem(message, path="layout.graphs", remedy="remove it, or use NCCL")])
    return MicroBatchGraphs(layout.joined_micro_batches).run


def _make_rebalancing(layout: Layout, spec: ReferenceModel) -> Rebalancing | None:
    first = find_placement(layout, spec)
    if layout.rebalance is None or first is None:
        return None
    policy = Policy(**layout.rebalance.model_dump())
    return Rebalancing(policy, first, find_source(layout, dist.get_rank()))


def _assemble_custom(recipe: Recipe, layout: Layout, meshes: Meshes, device: torch.device) -> TrainingProgram:
    subject = subject_of(recipe)
    whole = subject.build(device, dtype_of(recipe.precision), experts=layout.experts)
    fill_initial(recipe, whole)
    values = {} if layout.parallelize is None else _copy_values(whole)
    make_optimizer = partial(build_model_optimizer, recipe.optimizer, layout.optimizer)
    compute = compute_dtype_of(recipe.precision)
    done = parallelize_custom(whole, layout, meshes, device, make_optimizer, compute)
    shards = parameters(done.model) if layout.parallelize is None else done.list_shards(values)
    flat = keeps_flat_shards(done.model)
    return TrainingProgram(
        subject=subject,
        model=done.model,
        shards=shards,
        buffers=buffers(done.model),
        routers=find_routers(done.model),
        share=share_of(recipe, layout, meshes),
        device=device,
        sums=sums_of(layout, meshes),
        scale=float(meshes.size("loss")),
        num_micro_batches=layout.micro_batches,
        optimizer_implementation=layout.optimizer,
        accumulate=done.accumulate or _choose_accumulation(done.model, layout),
        loss_context=loss_parallel if layout.loss_parallel else nullcontext,
        finalize=partial(_finalize, done, shards),
        sum_over_shards=partial(sum_over, group=meshes.group("fsdp")) if flat else None,
        counted_regions=None if flat else _count_regions(done, shards),
        engine=done.engine,
        custom_step=None if recipe.step is None else _make_custom_step(recipe.step, done, meshes),
    )


def _choose_accumulation(
    model: nn.Module, layout: Layout
) -> Callable[[bool], AbstractContextManager[object]]:
    """Return the factory of the context around a micro-batch.

    It makes an empty context for a single micro-batch. Settings that the user has switched off then stay
    off.
    """
    return partial(accumulate, model) if layout.micro_batches > 1 else lambda last: nullcontext()


def _make_custom_step(target: str, done: ParallelizedCustomModel, meshes: Meshes) -> CustomStep:
    """Return a user's step under a layout.

    Raises: CaseError when `parallelize` returned an engine that carries out the steps itself.
    """
    if type(done.engine) not in (PlainEngine, PreparedEngine):
        message = (
            f"`{target}` would run beside {type(done.engine).__name__}, which carries out the steps by itself"
        )
        remedy = (
            "remove `step`, or let `parallelize` return the model alone and call the framework in the step"
        )
        raise CaseError([Problem(message, path="recipe.step", remedy=remedy)])
    return CustomStep(target, mesh=meshes.data[MESH_AXES], finish=done.finalize)


def _copy_values(whole: nn.Module) -> dict[str, Tensor]:
    """Return copies of all initial parameters by name: `parallelize` may modify the model in place."""
    return {shard.name: shard.local().clone() for shard in parameters(whole)}


def _count_regions(done: ParallelizedCustomModel, shards: Sequence[LocalShard]) -> frozenset[str] | None:
    """Return the parameters that this rank counts in the norm; None if torch's norm over meshes is right."""
    is_in_grad = getattr(type(done.engine), "gradient", None) is PlainEngine.gradient
    if is_in_grad and are_plain_tensors_everywhere(shards):
        return None
    return count_regions_once(shards)


def _finalize(done: ParallelizedCustomModel, shards: Sequence[LocalShard]) -> None:
    """Complete the gradients of a user's model and give each DTensor gradient its parameter's placements."""
    if done.finalize is not None:
        done.finalize()
    finalize_gradients([shard.tensor for shard in shards], [])


@seam
def share_of(recipe: Recipe, layout: Layout, meshes: Meshes) -> Share:
    """Return this rank's share of the batch: rows by data-parallel rank, positions by cp rank."""
    rows = split_rows(recipe.data.batch, layout.data_ranks, meshes.plan.row_share(dist.get_rank()))
    cp_rank = meshes.coordinate("cp")
    positions = split_positions(recipe.data.seq_len, layout.cp, cp_rank, layout.context_parallel)
    return Share(rows, as_indices(positions))


def shapes_of(recipe: Recipe, layout: Layout) -> Shapes:
    """Return the shapes of the tensors that pipeline stages exchange."""
    positions = recipe.data.seq_len // layout.cp
    return Shapes(
        rows=recipe.data.batch // (layout.data_ranks * layout.micro_batches),
        positions=positions,
        hidden_positions=positions // layout.tp if layout.sequence_parallel else positions,
    )


def sums_of(layout: Layout, meshes: Meshes) -> GroupSums:
    """Return the sums of integers over the ranks of this layout."""

    def over(*axes: str) -> partial[Tensor] | None:
        used = [axis for axis in axes if meshes.size(axis) > 1]
        return partial(_sum_over_groups, groups=[meshes.group(axis) for axis in used]) if used else None

    batch, sequence = over("loss"), over("cp")
    tokens = over("loss", "tp") if layout.slices_tokens else batch
    default = GroupSums()
    return GroupSums(
        over_batch=batch or default.over_batch,
        over_sequence=sequence or default.over_sequence,
        over_tokens=tokens or default.over_tokens,
    )


def _sum_over_groups(tensor: Tensor, groups: list[torch.distributed.ProcessGroup]) -> Tensor:
    for group in groups:
        tensor = sum_over(tensor, group)
    return tensor


def fill_initial(recipe: Recipe, model: nn.Module) -> None:
    """Fill this rank's shards of the reference model with initial values in the recipe's precision.

    A user's model is left alone: its factory has set its values.

    Raises: CaseError when the recipe's weights do not fit its model.
    """
    spec = recipe.model.reference
    if spec is not None and spec.weights is not None:
        load_initial(spec, dtype_of(recipe.precision), model)
    elif spec is not None:
        fill_shards(spec, recipe.seed, recipe.precision, model)


@torch.no_grad()
def fill_shards(spec: ReferenceModel, seed: int, precision: str, model: nn.Module) -> None:
    """Fill this rank's shards of the reference model; an element is a hash of seed, name and global index."""
    dtype = dtype_of(precision)
    for shard in [*parameters(model), *buffers(model)]:
        fill_one(spec, seed, shard, dtype)


@unseen  # a hash takes two dozen operators per tensor, and a recorder would keep all of their values
def _draw(spec: ReferenceModel, seed: int, shard: LocalShard, device: torch.device) -> Tensor:
    """Return the initial values of the elements of a shard, in float64."""
    index = shard.region.flat_index(device=device)
    return initial_values(spec, seed, shard.name, shard.region.shape, index)


@seam
def fill_one(spec: ReferenceModel, seed: int, shard: LocalShard, dtype: torch.dtype) -> None:
    """Fill one shard with initial values rounded to `dtype`."""
    local = shard.local()
    values = _draw(spec, seed, shard, local.device)
    # Rounded to the dtype of the recipe, so that a golden in float64 starts from the same values.
    local.copy_(values.to(dtype).to(local.dtype).reshape(local.shape))
