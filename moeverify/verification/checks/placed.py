"""Check that each rank stores the experts that the placement of the step assigns to it.

Does not apply to a layout that never moves experts. Experts that were not moved still have the right values
under their old numbers, so only the regions reveal them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from moeverify.cases.axes.expert_placement import find_placement, list_exchanges
from moeverify.cases.axes.mesh import MeshPlan
from moeverify.parallel.regions.region import Region
from moeverify.results.checks import CheckName, Kind
from moeverify.results.facts import ShardingFacts
from moeverify.results.finding import Finding
from moeverify.tools.placement.buckets import Bucket, list_buckets
from moeverify.tools.placement.placement import Placement
from moeverify.tools.placement.policy import Policy, list_solved
from moeverify.verification.checks.base import Shown


def find_misplaced(shown: Shown) -> Iterator[Finding]:
    """Yield a finding for each stacked weight of which a rank stores experts not assigned to it.

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
