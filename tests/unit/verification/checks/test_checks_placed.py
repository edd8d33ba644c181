"""Experts are on the ranks that the placement of each step names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from moeverify.cases.validation.load import build_case
from moeverify.parallel.regions.region import Region
from moeverify.results.load import ExpertLoad
from moeverify.tools.placement.buckets import list_buckets
from moeverify.tools.placement.placement import Placement
from moeverify.tools.placement.policy import Policy, list_solved
from moeverify.verification.checks.base import ShownTensors
from moeverify.verification.checks.placed import find_misplaced
from moeverify.verification.compare.assembled import Assembled
from moeverify.verification.compare.comparison import ComparedShard

NAME, SHAPE = "layers.1.moe.experts.up", (16, 4, 2)
HALVES = (tuple(range(8)), tuple(range(8, 16)))
STRIPES = (tuple(range(0, 16, 2)), tuple(range(1, 16, 2)))


def make_case(**layout: Any) -> Any:
    recipe = {"model": {"preset": "stress"}, "steps": 4}
    return build_case({"name": "c", "recipe": recipe, "layout": {"dp_shard": 2, "ep": 2, **layout}})


def show(step: int, kind: str, *rows: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, str, str], Assembled]:
    """Return a stacked weight of which each rank stores blocks of experts."""
    tensor = Assembled((step, kind, NAME))
    for rank, blocks in enumerate(rows):
        for experts in blocks:
            region = Region.box(SHAPE, [experts, range(4), range(2)])
            entry = SimpleNamespace(region=region.key, shape=SHAPE)
            tensor.shards.append((rank, cast(ComparedShard, entry)))
    return tensor.key, tensor


def list_wrong(case: Any, *tensors: Any, load: Any = None) -> list[tuple[int, tuple[int, ...]]]:
    shown = ShownTensors({}, dict(tensors), cast(Any, None), case=case, golden_names={}, load=load)
    return [(finding.step, finding.ranks) for finding in find_misplaced(shown)]


def rows_of(matrix: tuple[tuple[int, ...], ...]) -> list[tuple[tuple[int, ...], ...]]:
    return [(row,) for row in matrix]


def test_each_step_is_held_to_its_own_placement() -> None:
    case = make_case(exchange={"2": "striped"})
    right = [
        (-1, "initial_weight", HALVES),
        (0, "update", HALVES),
        (1, "update", HALVES),
        (2, "update", STRIPES),
    ]
    assert list_wrong(case, *(show(step, kind, *rows_of(rows)) for step, kind, rows in right)) == []
    assert list_wrong(case, show(2, "update", *rows_of(HALVES))) == [(2, (0, 1))]
    assert list_wrong(case, show(1, "update", *rows_of(STRIPES))) == [(1, (0, 1))]


def test_a_rank_that_stayed_behind_is_named() -> None:
    case = make_case(exchange={"1": "striped"})
    assert list_wrong(case, show(3, "update", (STRIPES[0],), (HALVES[1],))) == [(3, (1,))]


def test_replicas_are_blocks_of_their_own() -> None:
    matrix = [list(range(9)), list(range(8, 16))]
    case = make_case(placement=matrix)
    own = ((tuple(range(8)), (8,)), ((8,), tuple(range(9, 16))))
    assert list_wrong(case, show(0, "update", *own)) == []
    assert list_wrong(case, show(0, "update", (tuple(range(9)),), own[1])) == [(0, (0,))]


def make_load(hot: int) -> ExpertLoad:
    """Return a load of three steps in which one expert gets as much as all others together."""
    copies = [[10 if expert != hot else 150] * 2 for expert in range(16)]
    step = [copies, copies]
    return ExpertLoad(layers=(1, 2), num_experts=16, num_sources=2, top_k=2, copies=(step,) * 4)


def test_placements_that_a_run_solves_are_solved_again_from_its_load() -> None:
    case, load = make_case(rebalance={"every": 2, "slots": 9}), make_load(hot=3)
    first, policy = Placement(16, (HALVES, HALVES), (1, 2)), Policy(every=2, slots=9)
    solved = list_solved(np.array(load.copies), first, policy)
    assert list(solved) == [2]
    buckets = list_buckets(solved[2].matrices[0])
    rows = [tuple(bucket.experts for bucket in buckets if rank in bucket.holders) for rank in range(2)]
    assert len(rows[0]) > 1, "the hot expert has a replica"
    before = show(1, "update", *rows_of(HALVES))
    assert list_wrong(case, before, show(2, "update", *rows), load=load) == []
    assert list_wrong(case, before, show(2, "update", *rows_of(HALVES)), load=load) == [(2, (0, 1))]
    assert list_wrong(case, show(2, "update", *rows), load=make_load(hot=12)) == [(2, (0, 1))]


@pytest.mark.parametrize("layout", [{}, {"ep": 1}])
def test_a_layout_without_a_placement_has_none_to_keep(layout: dict[str, Any]) -> None:
    assert list_wrong(make_case(**layout), show(0, "update", *rows_of(STRIPES))) == []
