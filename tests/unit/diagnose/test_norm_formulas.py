"""Norms of what ranks had before a sum, and clip coefficients that are made of a right norm otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from wrong_tensors import AXES, draw, examine, make_inputs, make_tensor

from moeverify.diagnose.hypotheses.base import Outcome
from moeverify.diagnose.reductions import Brought
from moeverify.layout.region import Region
from moeverify.results.factor import Product
from moeverify.results.operation import NormOfPartials, Reclipped
from moeverify.results.trace import CollectiveRecord

PARTS = {f"layers.{layer}.norm.weight": [draw(7, seed=layer), draw(7, seed=9 + layer)] for layer in range(3)}
OTHER = draw(50, seed=30)  # a gradient that is not summed
GOLDEN = {name: sum(parts) for name, parts in PARTS.items()} | {"head.weight": OTHER}


def bring(rank: int, number: int, values: torch.Tensor) -> Brought:
    record = CollectiveRecord(
        number=number,
        op="all_reduce",
        group=(0, 1),
        group_name="",
        sequence=number,
        site="plan.py:1",
        state="finished",
    )
    return Brought(record, values)


def ask_norm(square: float, **fields: Any) -> Outcome:
    """Return what is said of a norm with this square on both ranks."""
    total = sum(float(each.square().sum()) for each in GOLDEN.values())
    expected, actual = (torch.tensor(value, dtype=torch.float64).sqrt() for value in (total, square))
    tensor = make_tensor(expected, actual, actual, name="total", kind="gradient_norm", **fields)
    brought = {
        rank: [bring(rank, number, parts[rank]) for number, parts in enumerate(PARTS.values(), 1)]
        for rank in (0, 1)
    }
    regions = {name: dict.fromkeys((0, 1), Region.whole(each.shape)) for name, each in GOLDEN.items()}
    inputs = make_inputs(
        tensor, brought=brought, regions=regions, golden=lambda kind, name, before: GOLDEN.get(name)
    )
    return examine("norm_of_partials", tensor, inputs)


def square_of(combination: str, names: list[str]) -> float:
    total = 0.0
    for name, golden in GOLDEN.items():
        if name not in names:
            total += float(golden.square().sum())
            continue
        norms = [float(part.norm()) for part in PARTS[name]]
        total += {"norms": sum(norms) ** 2, "squares": sum(norm**2 for norm in norms), "own": norms[0] ** 2}[
            combination
        ]
    return total


@pytest.mark.parametrize("combination", ["norms", "squares", "own"])
@pytest.mark.parametrize("names", [list(PARTS), [*PARTS][1:2]])
def test_a_norm_of_what_was_not_summed_yet(combination: Any, names: list[str]) -> None:
    explanation = ask_norm(square_of(combination, names)).explanation
    assert explanation is not None
    assert explanation.operation == NormOfPartials(
        combination=combination,
        tensors=tuple(names),
        axes=tuple(Product(times=(axis,)) for axis in AXES.groups),
    )


def test_a_norm_that_is_off_by_another_amount_is_refused() -> None:
    right = square_of("norms", [])
    for excess in (1e-3, 0.1, 0.5, -0.02):
        assert ask_norm(right * (1.0 + excess)).explanation is None


def test_a_narrower_norm_is_not_read() -> None:
    (trial,) = ask_norm(square_of("norms", list(PARTS)), precision=torch.float32).trials
    assert trial.verdict == "untried"


NORM, LIMIT, GUARD = 0.7, 0.3, 1e-6


def ask_clip(actual: float, norm: float = NORM, **fields: Any) -> Outcome:
    """Return what is said of this coefficient in the place of the right one."""
    right = torch.tensor(min(1.0, LIMIT / (norm + GUARD)), dtype=torch.float64)
    wrong = torch.tensor(actual, dtype=torch.float64)
    tensor = make_tensor(right, wrong, wrong, name="clip_coefficient", kind="gradient_norm", **fields)
    total = torch.tensor(norm, dtype=torch.float64)
    inputs = make_inputs(tensor, max_norm=LIMIT, golden=lambda kind, name, before: total)
    return examine("clip_formula", tensor, inputs)


@pytest.mark.parametrize(
    ("way", "actual", "norm"),
    [
        ("unbounded", LIMIT / (0.1 + GUARD), 0.1),
        ("without-limit", 1.0 / (2.0 + GUARD), 2.0),
        ("squared", (LIMIT / (NORM + GUARD)) ** 2, NORM),
        ("of-squared-norm", LIMIT / (NORM**2 + GUARD), NORM),
        ("root", (LIMIT / (NORM + GUARD)) ** 0.5, NORM),
    ],
)
def test_another_formula_of_the_clip(way: Any, actual: float, norm: float) -> None:
    explanation = ask_clip(actual, norm).explanation
    assert explanation is not None
    assert explanation.operation == Reclipped(way=way)


@pytest.mark.parametrize("count", [0.0, 2.0])
def test_a_guard_that_is_added_another_number_of_times(count: float) -> None:
    explanation = ask_clip(LIMIT / (NORM + count * GUARD)).explanation
    assert explanation is not None
    operation = explanation.operation
    assert isinstance(operation, Reclipped)
    assert operation.factor is not None
    assert operation.factor.value == count
    assert bool(operation.factor.equals) == (count == 2.0)


@pytest.mark.parametrize("count", [1.5, 7.0, -2.0])
def test_a_guard_that_is_no_number_of_the_run_is_none(count: float) -> None:
    assert ask_clip(LIMIT / (NORM + count * GUARD)).explanation is None


def test_a_guard_below_rounding_is_not_read() -> None:
    assert ask_clip(LIMIT / (1e6 + 2.0 * GUARD), 1e6).explanation is None
    (trial,) = ask_clip(LIMIT / (NORM + 2.0 * GUARD), precision=torch.float32).trials
    assert trial.verdict == "untried"
