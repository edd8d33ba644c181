"""From a recipe, alone or under a layout, to a program that is ready to train on this rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

from moeverify.axes.split import split_positions, split_rows
from moeverify.case.schema import CustomModel, Layout, Precision, Recipe, ReferenceModel
from moeverify.layout.local_shard import LocalShard, buffers, logical_name, parameters
from moeverify.layout.region import as_indices
from moeverify.model.init import initial_values
from moeverify.model.mixed_precision import Narrowed
from moeverify.model.transformer import Transformer
from moeverify.parallel.collectives import sum_over
from moeverify.parallel.gradients import finalize_gradients
from moeverify.parallel.meshes import Meshes
from moeverify.parallel.pipeline import Shapes, build_stages
from moeverify.parallel.plan import Fill, parallelize, parallelize_stages
from moeverify.parallel.wrapper import accumulate, keeps_flat_shards
from moeverify.seams import seam
from moeverify.train.custom_model import Divided, build_foreign, cast, divide
from moeverify.train.data import Share, whole_share
from moeverify.train.objective import Sums
from moeverify.train.program import Program, compute_dtype_of, dtype_of, find_routers


def assemble_single(
    recipe: Recipe, device: torch.device, *, compute: Precision | None = None, share: Share | None = None
) -> Program:
    """Return the program of a single device, which runs no parallel code at all.

    `compute` is the precision of the arithmetic, by default the recipe's; initial values are rounded to the
    recipe's in any case. `share` may reorder the rows of the batch; it must hold all of them.
    """
    dtype = dtype_of(compute or recipe.precision)
    if isinstance(recipe.model, CustomModel):
        model = cast(build_foreign(recipe.model, recipe.seed, recipe.precision, device), dtype)
    else:
        model = _build_reference(recipe.model, recipe, dtype, device)
    if compute_dtype_of(compute or recipe.precision) != dtype:
        model = Narrowed(model, compute_dtype_of(compute or recipe.precision))
    return Program(
        model=model,
        holdings=parameters(model),
        buffers=buffers(model),
        routers=find_routers(model, logical_name),
        share=share or whole_share(recipe.data),
        device=device,
    )


def assemble_parallel(
    recipe: Recipe, layout: Layout, meshes: Meshes, device: torch.device, *, fill: Fill | None = None
) -> Program:
    """Return this rank's program under a layout. Collective: all ranks of the layout.

    `fill` gives the reference model other values than the recipe's.

    The reference model is divided by `moeverify.parallel.plan`; a user's model, and any model under a user's
    `parallelize`, by `moeverify.train.custom_model`.
    """
    if isinstance(recipe.model, CustomModel) or layout.parallelize is not None:
        return _assemble_foreign(recipe, layout, meshes, device)
    dtype = dtype_of(recipe.precision)
    fill = fill or partial(fill_held, recipe.model, recipe.seed, recipe.precision)
    if layout.pp == 1:
        model = Transformer(recipe.model, experts=layout.experts, dtype=dtype, device="meta")
        done = parallelize(model, layout, meshes, device, fill, compute_dtype_of(recipe.precision))
    else:
        rank = meshes.coordinate("pp")
        stages = build_stages(recipe.model, layout, rank, experts=layout.experts, dtype=dtype)
        done = parallelize_stages(stages, shapes_of(recipe, layout), layout, meshes, device, fill)
    routers = [
        type(view)(view.name, view.module, done.router_positions)
        for view in find_routers(done.model, logical_name)
    ]
    return Program(
        model=done.model,
        holdings=done.holdings,
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
        pipeline=done.pipeline,
    )


def _assemble_foreign(recipe: Recipe, layout: Layout, meshes: Meshes, device: torch.device) -> Program:
    if isinstance(recipe.model, CustomModel):
        plain = build_foreign(recipe.model, recipe.seed, recipe.precision, device)
    else:
        plain = _build_reference(recipe.model, recipe, dtype_of(recipe.precision), device, layout.experts)
    done = divide(plain, layout, meshes, device, compute_dtype_of(recipe.precision))
    holdings = parameters(done.model)
    flat = keeps_flat_shards(done.model)
    return Program(
        model=done.model,
        holdings=holdings,
        buffers=buffers(done.model),
        routers=find_routers(done.model, logical_name),
        share=share_of(recipe, layout, meshes),
        device=device,
        sums=sums_of(layout, meshes),
        scale=float(meshes.size("loss")),
        num_micro_batches=layout.micro_batches,
        optimizer_implementation=layout.optimizer,
        accumulate=partial(accumulate, done.model),
        loss_context=loss_parallel if layout.loss_parallel else nullcontext,
        finalize=partial(_finalize, done, holdings),
        sum_over_shards=partial(sum_over, group=meshes.group("fsdp")) if flat else None,
    )


def _finalize(done: Divided, holdings: Sequence[LocalShard]) -> None:
    """Complete the gradients of a user's model; a DTensor's gradient is placed as its parameter, whatever came."""
    if done.finalize is not None:
        done.finalize()
    finalize_gradients([held.tensor for held in holdings], [])


def _build_reference(
    spec: ReferenceModel, recipe: Recipe, dtype: torch.dtype, device: torch.device, experts: str = "loop"
) -> nn.Module:
    model = Transformer(spec, experts=experts, dtype=dtype, device=device)
    fill_held(spec, recipe.seed, recipe.precision, model)
    return model


@seam
def share_of(recipe: Recipe, layout: Layout, meshes: Meshes) -> Share:
    """Return the rows and positions that this rank sees: rows by data-parallel rank, positions by cp rank."""
    data_rank = meshes.coordinate("dp_replicate") * layout.dp_shard + meshes.coordinate("dp_shard")
    rows = split_rows(recipe.data.batch, layout.data_ranks, data_rank)
    cp_rank = meshes.coordinate("cp")
    positions = split_positions(recipe.data.seq_len, layout.cp, cp_rank, layout.context_parallel)
    return Share(rows, as_indices(positions))


def shapes_of(recipe: Recipe, layout: Layout) -> Shapes:
    """Return the shapes of what the stages of a pipeline send to each other."""
    positions = recipe.data.seq_len // layout.cp
    return Shapes(
        rows=recipe.data.batch // (layout.data_ranks * layout.micro_batches),
        positions=positions,
        hidden_positions=positions // layout.tp if layout.sequence_parallel else positions,
    )


def sums_of(layout: Layout, meshes: Meshes) -> Sums:
    """Return how integers are summed over the ranks of this layout."""

    def over(*axes: str) -> partial[Tensor] | None:
        used = [axis for axis in axes if meshes.size(axis) > 1]
        return partial(_sum_over_groups, groups=[meshes.group(axis) for axis in used]) if used else None

    batch, sequence = over("loss"), over("cp")
    tokens = over("loss", "tp") if layout.slices_tokens else batch
    default = Sums()
    return Sums(
        over_batch=batch or default.over_batch,
        over_sequence=sequence or default.over_sequence,
        over_tokens=tokens or default.over_tokens,
    )


def _sum_over_groups(tensor: Tensor, groups: list[torch.distributed.ProcessGroup]) -> Tensor:
    for group in groups:
        tensor = sum_over(tensor, group)
    return tensor


@torch.no_grad()
def fill_held(spec: ReferenceModel, seed: int, precision: str, model: nn.Module) -> None:
    """Fill what this rank holds of the reference model with its initial values, rounded to the precision."""
    dtype = dtype_of(precision)
    for held in [*parameters(model), *buffers(model)]:
        fill_one(spec, seed, held, dtype)


@seam
def fill_one(spec: ReferenceModel, seed: int, held: LocalShard, dtype: torch.dtype) -> None:
    """Fill one held tensor, some millions of elements at a time."""
    local = held.local()
    index = held.region.flat_index(device=local.device)
    values = initial_values(spec, seed, held.name, held.region.shape, index)
    local.copy_(values.to(dtype).to(local.dtype).reshape(local.shape))
