"""Whether experts are where the placement of each step has them, of which a layout that never moves any says nothing.

Values that stayed where they were are right too, under the numbers that they had: only the regions tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from moeverify.axes.expert_placement import find_placement, list_exchanges
from moeverify.axes.mesh import MeshPlan
from moeverify.checks.base import Shown
from moeverify.layout.region import Region
from moeverify.placement.buckets import Bucket, list_buckets
from moeverify.placement.placement import Placement
from moeverify.placement.policy import Policy, list_solved
from moeverify.results.checks import CheckName, Kind
from moeverify.results.facts import ShardingFacts
from moeverify.results.finding import Finding


def find_misplaced(shown: Shown) -> Iterator[Finding]:
    """Yield a finding for each stacked weight of which a rank stores other experts than the placement gives it.

    Weights after a step are not compared, so they are not shown; updates have their regions.
    """
    model, layout = shown.case.recipe.model.reference, shown.case.layout
    first = None if model is None else find_placement(layout, model)
    if model is None or first is None:
        return
    exchanges = list_exchanges(layout, model)
    if layout.rebalance is not None:
        if shown.load is None:
            return
        # Solved again from what was counted apart from the run's own trace: that is part of what is judged.
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
            yield Finding(
                check=CheckName.SHARDING,
                kind=kind,
                tensor=name,
                step=step,
                rank=wrong[0],
                ranks=tuple(wrong),
                coordinates=shown.place(wrong[0]),
                error=1.0,
                bound=0.0,
                facts=ShardingFacts(axis="ep", part="experts", is_misplaced=True),
            )


def find_current(first: Placement, exchanges: Mapping[int, Placement], step: int) -> Placement:
    """Return the placement in force in a step: `step` steps have been trained before it."""
    done = [after for after in exchanges if after <= step]
    return exchanges[max(done)] if done else first


def list_keys(shape: tuple[int, ...], buckets: tuple[Bucket, ...], coordinate: int) -> frozenset[str]:
    """Return the keys of the regions that the rank at a coordinate of ep has of a stacked weight."""
    return frozenset(
        Region.box(shape, [bucket.experts, *map(range, shape[1:])]).key
        for bucket in buckets
        if coordinate in bucket.holders
    )


def _find_matrix(placement: Placement, name: str) -> tuple[tuple[int, ...], ...]:
    """Return the matrix of the block that a tensor is in: `layers.3.moe.experts.up` is in block 3."""
    number = int(name.split("layers.")[1].split(".", maxsplit=1)[0])
    return placement.matrices[placement.layers.index(number)]
