"""Observation of the reference model's routers, replay of a golden's routing, and the selection bias."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeverify.cases.schema import MoE, Recipe
from moeverify.model.router import RouterRecord
from moeverify.parallel.regions.observer import Observer
from moeverify.parallel.regions.region import Indices, Region
from moeverify.results.checks import Kind
from moeverify.seams import seam
from moeverify.train.data import MicroBatch
from moeverify.train.program import ReadableState, TrainingProgram
from moeverify.train.routers import RouterView


def _region(recipe: Recipe, batch: MicroBatch, positions: Indices, top_k: int) -> Region:
    shape = (recipe.data.batch, recipe.data.seq_len, top_k)
    return Region.box(shape, (batch.share.rows, positions, range(top_k)))


@seam
def observe_routing(
    recipe: Recipe,
    program: TrainingProgram,
    batch: MicroBatch,
    observer: Observer,
    step: int,
    replayed: ReadableState | None,
) -> list[Tensor]:
    """Report the routing of the last forward pass and return the counts (E) of each router.

    Without a replay the ids and margins are reported. With a replay, `router_flips` is reported instead. It
    is the golden's score margin for each token whose own choice differs from the golden's, else 0. A small
    margin is a benign flip.

    Raises: RuntimeError when a router was never called; KeyError when the golden lacks its routing.
    """
    counts: list[Tensor] = []
    for router in program.routers:
        record = router.module.record
        if record is None:
            raise RuntimeError(f"{router.name} was never called")
        positions = router.positions(batch.share.positions)
        region = _region(recipe, batch, positions, record.ids.shape[-1])
        tokens = Region.box(region.shape[:-1], region.dims[:-1])
        if replayed is None:
            observer.observe(step, Kind.ROUTER_IDS, router.name, record.ids, region)
            observer.observe(step, Kind.ROUTER_MARGIN, router.name, record.margin, tokens)
        else:
            chosen = _region(recipe, batch, positions, router.module.spec.top_k)
            flips = _find_flips(record, replayed, router.name, step, chosen, tokens)
            observer.observe(step, Kind.ROUTER_FLIPS, router.name, flips, tokens)
            region = _region(recipe, batch, positions, record.weights.shape[-1])  # of the replayed choice
        observer.observe(step, Kind.ROUTER_WEIGHTS, router.name, record.weights, region)
        counts.append(record.counts)
    return counts


def _find_flips(
    record: RouterRecord, golden: ReadableState, name: str, step: int, region: Region, tokens: Region
) -> Tensor:
    expected = golden.read(step, Kind.ROUTER_IDS, name, region)
    margin = golden.read(step, Kind.ROUTER_MARGIN, name, tokens)
    if expected is None or margin is None:
        raise KeyError(f"the golden has no routing of {name} at step {step}")
    expected, margin = (send(values, record.ids.device) for values in (expected, margin))
    if record.ids.shape != expected.shape:
        return margin  # another number of choices differs for every token
    # As sets: the order of two chosen experts does not change the output beyond rounding.
    flipped = (record.ids.sort(dim=-1).values != expected.sort(dim=-1).values).any(dim=-1)
    return torch.where(flipped, margin, 0.0)


def replay(
    recipe: Recipe,
    routers: Sequence[RouterView],
    batch: MicroBatch,
    golden: ReadableState,
    step: int,
    device: torch.device,
) -> None:
    """Set the golden's ids as the routing of the next forward pass of these routers."""
    for router in routers:
        positions = router.positions(batch.share.positions)
        region = _region(recipe, batch, positions, router.module.spec.top_k)
        ids = golden.read(step, Kind.ROUTER_IDS, router.name, region)
        if ids is None:
            raise KeyError(f"the golden has no routing of {router.name} at step {step}")
        router.module.replay = send(ids, device)


def send(values: Tensor, device: torch.device) -> Tensor:
    """Copy CPU values to a device without synchronizing with the device's pending work."""
    if device.type == "cpu":
        return values
    return values.contiguous().pin_memory().to(device, non_blocking=True)


@seam
@torch.no_grad()
def update_selection_bias(
    moe: MoE, program: TrainingProgram, counts: Sequence[Tensor], observer: Observer, step: int
) -> None:
    """Move each expert's selection bias towards balance by the counts of the whole step.

    bias += rate * sign(mean(counts) - counts), over all micro-batches and ranks. Collective: all ranks of
    the batch.
    Source: Wang et al. 2024, Auxiliary-Loss-Free Load Balancing (arXiv 2408.15664), algorithm 1.
    """
    for router, local in zip(program.routers, counts, strict=True):
        total = program.sums.over_tokens(local)
        observer.observe(step, Kind.ROUTER_COUNTS, router.name, total, Region.whole(total.shape))
        if router.module.selection_bias is not None and moe.selection_bias_rate > 0:
            move_bias(router.module.selection_bias, total, moe.selection_bias_rate)


@seam
def move_bias(bias: Tensor, counts: Tensor, rate: float) -> None:
    """Move a selection bias (E), in place, towards experts whose counts (E) are below the mean."""
    load = counts.to(bias.dtype)
    bias += rate * torch.sign(load.mean() - load)
