"""Mean and deviation of initial values: told of one kind of tensors, with the kinds that should have them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from wrong_tensors import draw, make_tensor

from moeverify.diagnose.spreads import find_spreads
from moeverify.diagnose.wrong_tensor import WrongTensor

RIGHT = {
    **{f"layers.{n}.norm.weight": 1.0 + 0.1 * draw(32, seed=n) for n in range(6)},
    **{f"layers.{n}.proj.weight": 0.02 * draw(40, 40, seed=10 + n) for n in range(6)},
    "head.weight": 0.2 * draw(40, 40, seed=20),
}
NORMS = [name for name in RIGHT if "norm" in name]


def start(values: list[Tensor]) -> list[WrongTensor]:
    return [
        make_tensor(RIGHT[name], value, name=name, kind="initial_weight")
        for name, value in zip(NORMS, values, strict=True)
    ]


@pytest.mark.parametrize(
    ("mean", "deviation", "like"),
    [
        pytest.param(0.0, 0.02, ("layers.*.proj.weight",), id="as matrices"),
        pytest.param(1.0, 0.02, (), id="another deviation"),
        pytest.param(0.0, 0.025, (), id="near the deviation of matrices"),
    ],
)
def test_norms_that_lie_elsewhere(mean: float, deviation: float, like: tuple[str, ...]) -> None:
    tensors = start([mean + deviation * draw(32, seed=100 + n) for n in range(6)])
    ((members, spread),) = find_spreads(tensors, RIGHT)
    assert members == tensors
    assert spread.mean == mean
    assert spread.deviation == pytest.approx(deviation, rel=0.2)
    assert (spread.right_mean, spread.right_deviation) == (1.0, pytest.approx(0.1, rel=0.2))
    assert spread.like == like


@pytest.mark.parametrize(
    "values",
    [
        pytest.param([1.0 + 0.1 * draw(32, seed=100 + n) for n in range(6)], id="the right ones"),
        pytest.param([0.02 * (n + 1) * draw(32, seed=100 + n) for n in range(6)], id="each its own"),
        pytest.param([n + 0.02 * draw(32, seed=100 + n) for n in range(6)], id="each around its own"),
        pytest.param([torch.zeros(32, dtype=torch.float64)] * 6, id="constant"),
    ],
)
def test_what_has_no_spread_of_its_own(values: list[Tensor]) -> None:
    assert find_spreads(start(values), RIGHT) == []
