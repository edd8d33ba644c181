"""What `moeverify mesh` shows: axes of experts only where experts are cut over other ranks than the rest."""

from __future__ import annotations

from typing import Any

import pytest

from moeverify.axes.groups import axis_affects
from moeverify.case.schema import Case
from moeverify.controller.mesh import make_picture
from moeverify.validation.load import build_case

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
