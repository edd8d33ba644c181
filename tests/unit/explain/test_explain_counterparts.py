"""Counterparts of operators whose operands belong to different calls on one device."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from generated import explain
from recordings import make, record_call
from torch import Tensor

from moeverify.explain.program import Program

X = make(8, 4)
WEIGHTS = [make(4, 4, seed=seed) for seed in range(1, 5)]
ROWS = [[0, 1, 2], [2, 3, 4], [4, 5, 6, 7], [6, 7, 0]]
"""Rows of each expert; some rows have two."""


def record(rows: Sequence[Sequence[int]], experts: Sequence[int], out: Sequence[int]) -> Program:
    """Record a rank whose `experts` compute with `rows`, and whose results are added in the rows `out`."""

    def compute(x: Tensor, **weights: Tensor) -> Tensor:
        done = [
            x[torch.tensor(each, dtype=torch.int64)] @ weights[f"w{expert}"]
            for each, expert in zip(rows, experts, strict=True)
        ]
        return torch.zeros(8, 4, dtype=torch.float64).index_add(0, torch.tensor(out), torch.cat(done)).sin()

    return record_call(compute, x=X, **{f"w{number}": each for number, each in enumerate(WEIGHTS)})


@pytest.mark.parametrize("experts", [[0, 2, 1, 3], [1, 0, 3, 2]])
def test_rows_that_another_expert_computes_are_named(experts: list[int]) -> None:
    out = [row for each in ROWS for row in each]
    (culprit,) = explain(record(ROWS, experts, out), record(ROWS, [0, 1, 2, 3], out))
    assert (culprit.mechanism, culprit.proved, culprit.operand) == ("operand", True, 1)
    assert culprit.taken is not None
    assert culprit.right is not None
    first = next(number for number, expert in enumerate(experts) if number != expert)
    assert (culprit.taken.label, culprit.right.label) == (f"w{experts[first]}", f"w{first}")


def test_experts_without_rows_need_no_counterpart() -> None:
    out = [row for each in ROWS for row in each]
    rank = record([*ROWS[:2], [], *ROWS[2:]], [0, 2, 3, 1, 3], out)
    (culprit,) = explain(rank, record(ROWS, [0, 1, 2, 3], out))
    assert culprit.proved
    assert culprit.right is not None
    assert culprit.right.label == "w1"


def test_rows_that_one_device_computes_in_two_calls_are_right_together() -> None:
    out = [row for each in ROWS for row in each]
    halves = [half for each in ROWS for half in (each[:2], each[2:])]
    one = record(halves, [0, 0, 1, 1, 2, 2, 3, 3], out)
    (culprit,) = explain(record(ROWS, [0, 2, 1, 3], out), one)
    assert (culprit.mechanism, culprit.proved, culprit.operand) == ("operand", True, 1)
