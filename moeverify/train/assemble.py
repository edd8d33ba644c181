"""From a recipe, alone or under a layout, to a program that is ready to train on this rank."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from moeverify.case.schema import ForeignModel, Layout, Precision, Recipe, ReferenceModel
from moeverify.layout.holding import Holding, buffers, logical_name, parameters
from moeverify.layout.region import as_indices
from moeverify.layout.split import split_positions, split_rows
from moeverify.model.init import initial_values
from moeverify.model.transformer import Transformer
from moeverify.parallel.collectives import sum_over
from moeverify.parallel.meshes import Meshes
from moeverify.parallel.plan import parallelize
from moeverify.train.data import Share, whole_share
from moeverify.train.forward import resolve
from moeverify.train.objective import Sums
from moeverify.train.program import Program, dtype_of, find_routers


def assemble_single(
    recipe: Recipe, device: torch.device, *, compute: Precision | None = None, share: Share | None = None
) -> Program:
    """Return the program of a single device, which runs no parallel code at all.

    `compute` is the precision of the arithmetic, by default the recipe's; initial values are rounded to the
    recipe's in any case. `share` may reorder the rows of the batch; it must hold all of them.
    """
    dtype = dtype_of(compute or recipe.precision)
    if isinstance(recipe.model, ForeignModel):
        model = build_foreign(recipe.model, recipe.seed, recipe.precision, device).to(dtype)
    else:
        model = Transformer(recipe.model, dtype=dtype, device=device)
        fill_held(recipe.model, recipe.seed, recipe.precision, model)
    return Program(
        model=model,
        holdings=parameters(model),
        buffers=buffers(model),
        routers=find_routers(model, logical_name),
        share=share or whole_share(recipe.data),
        device=device,
    )


def assemble_parallel(recipe: Recipe, layout: Layout, meshes: Meshes, device: torch.device) -> Program:
    """Return this rank's program under a layout. Collective: all ranks of the layout."""
    assert isinstance(recipe.model, ReferenceModel)
    dtype = dtype_of(recipe.precision)
    model = Transformer(recipe.model, experts=layout.experts, dtype=dtype, device="meta")
    fill = partial(fill_held, recipe.model, recipe.seed, recipe.precision)
    done = parallelize(model, layout, meshes, device, fill)
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
    )


def share_of(recipe: Recipe, layout: Layout, meshes: Meshes) -> Share:
    """Return the rows and positions that this rank sees: rows by data-parallel rank, positions by cp rank."""
    data_rank = meshes.coordinate("dp_replicate") * layout.dp_shard + meshes.coordinate("dp_shard")
    rows = split_rows(recipe.data.batch, layout.data_ranks, data_rank)
    cp_rank = meshes.coordinate("cp")
    positions = split_positions(recipe.data.seq_len, layout.cp, cp_rank, layout.context_parallel)
    return Share(rows, as_indices(positions))


def sums_of(layout: Layout, meshes: Meshes) -> Sums:
    """Return how integers are summed over the ranks of this layout."""

    def over(*axes: str) -> partial[Tensor] | None:
        used = [axis for axis in axes if meshes.size(axis) > 1]
        return partial(_sum_over_groups, groups=[meshes.group(axis) for axis in used]) if used else None

    batch, sequence = over("loss"), over("cp")
    tokens_sliced = layout.tp > 1 and layout.expert_tp == 1
    tokens = over("loss", "tp") if tokens_sliced else batch
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


def fill_one(spec: ReferenceModel, seed: int, held: Holding, dtype: torch.dtype) -> None:
    """Fill one held tensor, some millions of elements at a time."""
    local = held.local()
    index = held.region.flat_index(device=local.device)
    values = initial_values(spec, seed, held.name, held.region.shape, index)
    local.copy_(values.to(dtype).to(local.dtype).reshape(local.shape))


def build_foreign(model: ForeignModel, seed: int, precision: str, device: torch.device) -> nn.Module:
    """Return a user's model as its factory makes it under the seed, in the recipe's precision."""
    factory = resolve(model.factory, "recipe.model.factory")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        built: nn.Module = factory(**model.arguments)
    return built.to(device=device, dtype=dtype_of(precision))
