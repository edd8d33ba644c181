"""Weights of micro-batches, and the collective that reduces accumulated gradients again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from moeverify.diagnose.repeated_reduction import name_repeated_reduction
from moeverify.report.words.cause import describe_explanation
from moeverify.results.cause import Cause
from moeverify.results.collective import IssuedCollective
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.factor import Factor
from moeverify.results.operation import Scaled
from moeverify.results.part import Contribution, Part, Tokens
from moeverify.results.place import Place

SITE = "/opt/env/lib/python3.11/site-packages/other/parallel.py:377 in _all_reduce_grad"


def explain(weights: Mapping[int, float]) -> Explanation:
    wrong = tuple(
        Contribution(part=Part(tokens=Tokens(micro_batch=number)), factor=Factor(value=value))
        for number, value in weights.items()
    )
    subject = Subject(quantity=Quantity.GRADIENT, tensors=("q_norm.weight",))
    return Explanation(cause=Cause.SHARE_WEIGHTS, subject=subject, operation=Scaled(contributions=wrong))


def issue(**changes: Any) -> IssuedCollective:
    fields: dict[str, Any] = {
        "direction": "backward",
        "op": "all_reduce",
        "axis": "tp",
        "group": (0, 1),
        "times": 2,
        "shapes": ((8,),),
        "site": SITE,
    }
    return IssuedCollective(**fields | changes)


def find(
    explanation: Explanation, *issued: IssuedCollective, issued_in: str = "q_norm"
) -> IssuedCollective | None:
    place = Place(module="q_norm", issued=issued, issued_in=issued_in)
    operation = name_repeated_reduction(explanation, place, 8).operation
    assert isinstance(operation, Scaled)
    return operation.reduced_again


@pytest.mark.parametrize(
    ("weights", "group", "times"),
    [
        ({0: 2.0}, (0, 1), 2),
        ({0: 2.0}, (0, 1), 4),
        ({0: 8.0, 1: 4.0, 2: 2.0}, (0, 1), 4),
        ({0: 9.0, 1: 3.0}, (0, 1, 2), 3),
    ],
)
def test_powers_of_the_size_of_a_group_name_its_collective(
    weights: dict[int, float], group: tuple[int, ...], times: int
) -> None:
    collective = issue(group=group, times=times)
    assert (
        find(explain(weights), issue(direction="forward", group=group, times=times), collective) == collective
    )


@pytest.mark.parametrize(
    ("weights", "issued"),
    [
        ({0: 3.0}, [issue()]),
        ({1: 2.0}, [issue()]),
        ({0: 2.0, 1: 4.0}, [issue(times=3)]),
        ({0: 2.0}, [issue(times=1)]),
        ({0: 2.0}, [issue(op="all_gather")]),
        ({0: 2.0}, [issue(), issue(dtype="float32")]),
        ({0: 2.0}, [issue(shapes=((4, 10, 32),))]),
        ({0: 2.0}, []),
    ],
    ids=[
        "another factor",
        "the last one",
        "another order",
        "once",
        "no reduction",
        "two of them",
        "activations",
        "none",
    ],
)
def test_other_weights_and_other_collectives_name_none(
    weights: dict[int, float], issued: list[IssuedCollective]
) -> None:
    assert find(explain(weights), *issued) is None


def test_a_collective_of_a_module_around_names_none() -> None:
    assert find(explain({0: 2.0}), issue(), issued_in="layers.0") is None


def test_the_sentence_has_the_axis_and_the_line() -> None:
    place = Place(module="q_norm", issued=(issue(),), issued_in="q_norm")
    assert describe_explanation(name_repeated_reduction(explain({0: 2.0}), place, 8)) == (
        "in the gradient, the first micro-batch counts 2 times, since what has been accumulated is reduced "
        "again in each of 2 micro-batches by the all_reduce over tp at other/parallel.py:377 in _all_reduce_grad"
    )
