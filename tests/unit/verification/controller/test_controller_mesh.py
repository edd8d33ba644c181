"""Output of `moeverify mesh`: expert axes only if experts are sharded over other ranks than the rest."""

from __future__ import annotations

from typing import Any

import pytest

from moeverify.cases.axes.groups import axis_affects
from moeverify.cases.schema import Case
from moeverify.cases.validation.load import build_case
from moeverify.verification.controller.mesh import make_picture, make_shape

DENSE, EXPERTS = "tiny-gpt", "stress"


def make_case(preset: str, layout: dict[str, Any]) -> Case:
    data = {"batch": 16, "seq_len": 16}
    return build_case({"name": "c", "recipe": {"model": {"preset": preset}, "data": data}, "layout": layout})


@pytest.mark.parametrize(
    ("preset", "layout", "axes"),
    [
        (DENSE, {"tp": 2, "dp_shard": 2}, []),
        (EXPERTS, {"tp": 2, "dp_shard": 2}, []),
        (EXPERTS, {"tp": 2, "dp_shard": 2, "etp": 4}, ["etp"]),
        (EXPERTS, {"tp": 2, "dp_shard": 2, "ep": 2, "etp": 2}, ["ep", "etp"]),
    ],
    ids=["dense", "cut as the rest", "cut further", "expert parallel"],
)
def test_axes_of_experts(preset: str, layout: dict[str, Any], axes: list[str]) -> None:
    case = make_case(preset, layout)
    picture = make_picture(case)
    assert list(picture.borrowed) == axes
    assert [axis for axis in picture.groups if axis in ("ep", "etp")] == axes
    for place in picture.ranks:
        assert [axis for axis in place.coordinates if axis in ("ep", "etp")] == axes
    assert axis_affects(case, "etp", "layers.1.moe.experts.w1") == ("etp" in axes)


def test_experts_are_shown_where_each_placement_has_them() -> None:
    first, rest = list(range(0, 16, 3)), [expert for expert in range(16) if expert % 3]
    layout = {
        "dp_shard": 2,
        "ep": 2,
        "placement": {"1": [first, rest], "2": [rest, first]},
        "exchange": {"1": "striped"},
    }
    case = build_case({"name": "c", "recipe": {"model": {"preset": EXPERTS}, "steps": 3}, "layout": layout})
    shown = [place.holds for place in make_picture(case).ranks]
    evens, odds = tuple(range(0, 16, 2)), tuple(range(1, 16, 2))
    assert shown == [
        {"experts, layer 1": tuple(first), "experts, layer 2": tuple(rest), "after step 1": evens},
        {"experts, layer 1": tuple(rest), "experts, layer 2": tuple(first), "after step 1": odds},
    ]


def test_experts_that_are_placed_by_their_load_are_shown_as_they_are_at_first() -> None:
    layout = {"dp_shard": 2, "ep": 2, "rebalance": {"every": 1, "slots": 9}}
    case = build_case({"name": "c", "recipe": {"model": {"preset": EXPERTS}, "steps": 3}, "layout": layout})
    assert [place.holds for place in make_picture(case).ranks] == [
        {"experts at first": tuple(range(8))},
        {"experts at first": tuple(range(8, 16))},
    ]


def test_the_shape_has_the_groups_of_every_axis_of_more_than_one_rank() -> None:
    shape = make_shape(make_case(EXPERTS, {"dp_shard": 4, "ep": 2}).layout)
    assert shape.axes == {"dp_shard": 4}
    every = ((0, 1, 2, 3),)
    across = {"efsdp": ((0, 2), (1, 3)), "ep": ((0, 1), (2, 3))}
    assert shape.groups == {"dp_shard": every, "fsdp": every, "loss": every, **across}
    assert make_shape(make_case(DENSE, {}).layout).groups == {}
