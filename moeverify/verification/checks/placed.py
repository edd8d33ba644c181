"""Checks that each rank stores the experts of the step's placement, and each layer is on the rank of its stage.

The first does not apply to a layout that never moves experts. Experts that were not moved still have the
right values under their old numbers, so only the regions reveal them.

If two layers trade places, each stage still has the right number of layers and each layer is on one stage.
The model is wrong all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from moeverify.cases.axes.expert_placement import find_placement, list_exchanges
from moeverify.cases.axes.mesh import MeshPlan
from moeverify.cases.axes.stages import split_layers, stages_of
from moeverify.cases.schema import Layout
from moeverify.parallel.regions.observer import INITIAL
from moeverify.parallel.regions.region import Region
from moeverify.results.checks import CheckName, Kind
from moeverify.results.facts import ShardingFacts
from moeverify.results.finding import Finding
from moeverify.tools.placement.buckets import Bucket, list_buckets
from moeverify.tools.placement.placement import Placement
from moeverify.tools.placement.policy import Policy, list_solved
from moeverify.verification.checks.base import ShownTensors


def find_misplaced(shown: ShownTensors) -> Iterator[Finding]:
    """Yield a finding for each stacked weight with experts on a rank that they are not assigned to.

    Weights after a step are not compared and therefore not shown. Updates carry the same regions.
    """
    model, layout = shown.case.recipe.model.reference, shown.case.layout
    first = None if model is None else find_placement(layout, model)
    if model is None or first is None:
        return
    exchanges = list_exchanges(layout, model)
    if layout.rebalance is not None:
        if shown.load is None:
            return
        # Solved again from separately collected counts, since the run's own trace is under test.
        exchanges = list_solved(np.array(shown.load.copies), first, Policy(**layout.rebalance.model_dump()))
    view = MeshPlan.of(layout).sparse
    for (step, kind, name), tensor in shown.tensors.items():
        if kind not in (Kind.INITIAL_WEIGHT, Kind.UPDATE) or ".experts." not in name:
            continue
        buckets = list_buckets(_find_matrix(find_current(first, exchanges, step), name))
        shape = tensor.shards[0][1].shape
        wrong = [
            rank
            for rank, regions in tensor.list_regions().items()
            if regions != list_keys(shape, buckets, view.coordinates(rank)["ep"])
        ]
        if wrong:
            facts = ShardingFacts(axis="ep", part="experts", is_misplaced=True)
            yield shown.make_finding(CheckName.SHARDING, (step, kind, name), wrong, error=1.0, facts=facts)


def find_current(first: Placement, exchanges: Mapping[int, Placement], step: int) -> Placement:
    """Return the placement in force after `step` trained steps."""
    done = [after for after in exchanges if after <= step]
    return exchanges[max(done)] if done else first


def list_keys(shape: tuple[int, ...], buckets: tuple[Bucket, ...], coordinate: int) -> frozenset[str]:
    """Return the keys of a stacked weight's regions on the rank at an ep coordinate."""
    return frozenset(
        Region.box(shape, [bucket.experts, *map(range, shape[1:])]).key
        for bucket in buckets
        if coordinate in bucket.holders
    )


def _find_matrix(placement: Placement, name: str) -> tuple[tuple[int, ...], ...]:
    """Return the placement matrix of a tensor's block: `layers.3.moe.experts.up` is in block 3."""
    number = int(name.split("layers.")[1].split(".", maxsplit=1)[0])
    return placement.matrices[placement.layers.index(number)]


def find_elsewhere(shown: ShownTensors) -> Iterator[Finding]:
    """Yield one finding for the layers that are on a wrong rank of some pipeline.

    Layers on no rank of a pipeline are reported by `coverage`. Layers on their own rank and on others are
    repeated, not misplaced.
    """
    model, layout = shown.case.recipe.model.reference, shown.case.layout
    if model is None or layout.pp == 1:
        return
    holders = _list_holders(shown, model.num_layers)
    wrong: dict[int, set[int]] = {}
    for group in MeshPlan.of(layout).dense.groups("pp"):
        for layer, right in enumerate(list_owners(layout, model.num_layers)):
            found = holders[layer].intersection(group)
            if found and group[right] not in found:
                wrong.setdefault(layer, set()).update(found)
    if wrong:
        yield shown.make_finding(
            CheckName.SHARDING,
            (INITIAL, Kind.INITIAL_WEIGHT, "axis pp"),
            sorted(set().union(*wrong.values())),
            error=1.0,
            facts=ShardingFacts(axis="pp", modules=tuple(map(_name, sorted(wrong))), is_elsewhere=True),
        )


def list_owners(layout: Layout, num_layers: int) -> Sequence[int]:
    """Return for each layer the pp coordinate of the rank with its stage."""
    by_stage = {stage: rank for rank in range(layout.pp) for stage in stages_of(layout, rank)}
    sizes = map(len, split_layers(layout, num_layers))
    return [by_stage[stage] for stage, size in enumerate(sizes) for _ in range(size)]


def _list_holders(shown: ShownTensors, num_layers: int) -> list[set[int]]:
    """Return for each layer the ranks whose initial state contains a part of it."""
    holders: list[set[int]] = [set() for _ in range(num_layers)]
    by_name = {_name(layer): ranks for layer, ranks in enumerate(holders)}
    for (step, kind, name), tensor in shown.tensors.items():
        ranks = by_name.get(".".join(name.split(".")[:2]))
        if ranks is not None and step == INITIAL and kind == Kind.INITIAL_WEIGHT:
            ranks.update(tensor.list_regions())
    return holders


def _name(layer: int) -> str:
    return f"layers.{layer}"
