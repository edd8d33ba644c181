"""Gradients of replicas: sums of the ranks' own parts that lack parts, or have parts of other rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from recordings import make
from torch import Tensor

from moeverify.explain.culprits import Culprits
from moeverify.explain.explain import Explainer
from moeverify.explain.program import Program
from moeverify.explain.record import Recorder
from moeverify.parallel.regions.region import Region
from moeverify.results.cause import Cause
from moeverify.results.checks import Kind
from moeverify.results.culprit import Culprit, SumPart

SHAPE = (3, 24)
HELD = ((0, 1), (0,), (1, 2))
"""Rows of each rank: rows 0 and 1 are on two ranks each, row 2 on one."""


def take_parts(rank: int) -> Tensor:
    """Return a rank's part of the gradient of its own rows."""
    return make(*SHAPE, seed=rank)[list(HELD[rank])]


def record(rows: Sequence[int], part: Tensor, finish: Callable[[Tensor], object]) -> Program:
    """Record a backward pass whose gradient is `part`, and how a rank finishes it."""
    recorder, weight = Recorder(), make(len(rows), 24, seed=9).requires_grad_()
    recorder.name_tensors([("part", part)])
    with recorder.recording():
        recorder.begin_step(0)
        (weight * part).sum().backward()
        assert weight.grad is not None
        finish(weight.grad)
        recorder.observe(0, Kind.GRADIENT, "w", weight.grad, Region.box(SHAPE, [rows, range(24)]))
    recorder.program.shares = [((0,), (0,))]
    return recorder.program


def explain(finish: Callable[[int, Tensor], object]) -> list[Culprit]:
    whole = torch.zeros(SHAPE, dtype=torch.float64)
    for rank, rows in enumerate(HELD):
        whole[list(rows)] += take_parts(rank)
    one = record(range(3), whole, lambda grad: None)
    ranks = [
        record(rows, take_parts(rank), lambda grad, rank=rank: finish(rank, grad))
        for rank, rows in enumerate(HELD)
    ]
    explainer = Explainer(ranks, one, 0, [])
    culprits = Culprits(explainer)
    return [culprits.make(cause) for cause in explainer.explain(20.0)]


def add_others(rank: int, grad: Tensor) -> None:
    """Sum the parts of all holders of a rank's rows."""
    for other, rows in enumerate(HELD):
        for number, row in enumerate(HELD[rank]):
            if other != rank and row in rows:
                grad[number] += take_parts(other)[rows.index(row)]


def sum_nothing(rank: int, grad: Tensor) -> None:
    pass


def lose_part(rank: int, grad: Tensor) -> None:
    if rank == 1:
        grad.zero_()
    add_others(rank, grad)
    if rank == 0:
        grad[0] -= take_parts(1)[0]


def take_another_row(rank: int, grad: Tensor) -> None:
    add_others(rank, grad)
    if rank == 1:
        grad[0] -= take_parts(0)[0]
        grad[0] += take_parts(0)[1]


def take_mean(rank: int, grad: Tensor) -> None:
    """Divide the rows that two ranks hold by two."""
    add_others(rank, grad)
    grad *= torch.tensor([0.5, 0.5] if rank == 0 else [0.5, 1.0][: len(grad)])[:, None]


@pytest.mark.parametrize(
    ("finish", "cause", "sums"),
    [
        (
            sum_nothing,
            Cause.MISSING_REDUCTION,
            {((0,), 1, (0,)), ((1,), 0, (0,)), ((0,), 2, (1,)), ((2,), 0, (1,))},
        ),
        (lose_part, Cause.SHARE_WEIGHTS, {((0, 1), 1, (0,))}),
        (take_mean, Cause.SCALE, set()),
        (take_another_row, Cause.COLLECTIVES, {((1,), 0, (0,))}),
    ],
)
def test_a_wrong_sum_of_right_parts_is_told_by_its_parts(
    finish: Callable[[int, Tensor], object], cause: Cause, sums: set[tuple[object, ...]]
) -> None:
    (culprit,) = explain(finish)
    assert culprit.code == cause
    lacking = [each for each in culprit.sums if each.weight == 0.0]
    assert {(each.ranks, each.source, each.rows) for each in lacking} == sums
    assert {each.weight for each in culprit.sums} <= ({0.5} if cause is Cause.SCALE else {0.0, 1.0})
    others = [each for each in culprit.sums if each.source_rows]
    extra = SumPart(ranks=(1,), source=0, weight=1.0, rows=(0,), source_rows=(1,))
    assert others == ([extra] if cause is Cause.COLLECTIVES else [])


def test_a_write_that_loses_a_part_is_named_by_its_execution() -> None:
    (culprit,) = explain(lambda rank, grad: (grad.zero_() if rank == 1 else None, add_others(rank, grad)))
    assert (culprit.mechanism, culprit.proved, culprit.ranks) == ("removed", True, (1,))
    assert culprit.here.operator == "zero_"
    assert culprit.code is Cause.SHARE_WEIGHTS


def double(rank: int, grad: Tensor) -> None:
    add_others(rank, grad)
    grad *= 2


def disturb(rank: int, grad: Tensor) -> None:
    add_others(rank, grad)
    grad[0].sin_()


@pytest.mark.parametrize("finish", [double, disturb])
def test_a_multiple_and_what_is_no_sum_of_parts_are_not_called_wrong_sums(
    finish: Callable[[int, Tensor], object],
) -> None:
    assert all(not culprit.sums for culprit in explain(finish))


def test_right_sums_of_parts_have_no_cause() -> None:
    assert explain(add_others) == []


def test_a_part_of_other_rows_on_all_ranks_is_no_multiple() -> None:
    def add_foreign(rank: int, grad: Tensor) -> None:
        add_others(rank, grad)
        for number, row in enumerate(HELD[rank]):
            other = (row + 1) % 3
            source = next(each for each, rows in enumerate(HELD) if other in rows)
            grad[number] += take_parts(source)[HELD[source].index(other)]

    culprit, *_ = explain(add_foreign)
    assert culprit.mechanism == "reduction"
    assert {(each.weight, each.rows, each.source_rows) for each in culprit.sums} == {
        (1.0, (0,), (1,)),
        (1.0, (1,), (2,)),
        (1.0, (2,), (0,)),
    }
