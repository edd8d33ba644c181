"""Results that a comparison in 16 bits may leave undecided, and results that it must decide."""

from __future__ import annotations

from typing import Any

import pytest

from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.finding import CheckResult, Finding
from moeverify.results.operation import Scaled
from moeverify.scripts.compare.limits import are_undecided, set_aside

EXPLAINED = Explanation(
    cause=Cause.SCALE,
    subject=Subject(quantity=Quantity.GRADIENT, tensors=("layers.0.gate",)),
    operation=Scaled(contributions=()),
)


def find(error: float, check: str = CheckName.GRADIENT, **rest: Any) -> Finding:
    return Finding(
        check=check,
        kind="gradient",
        tensor="layers.0.gate",
        step=0,
        rank=0,
        ranks=(0,),
        coordinates={},
        error=error,
        bound=2.0**-4,
        **rest,
    )


def test_small_differences_of_gradients_without_a_cause_are_left_open() -> None:
    assert are_undecided([find(0.08), find(0.2, follows="layers.0.gate")])
    assert are_undecided([find(0.08), find(0.4, CheckName.UPDATE, follows="layers.0.gate")])
    assert not are_undecided([])


@pytest.mark.parametrize(
    "findings",
    [
        [find(0.3)],
        [find(0.08), find(0.3, follows="layers.0.gate")],
        [find(0.08), find(0.6, CheckName.UPDATE, follows="layers.0.gate")],
        [find(0.08, CheckName.UPDATE)],
        [find(0.08), find(0.01, CheckName.REPLICAS, follows="layers.0.gate")],
        [find(0.08, explanation=EXPLAINED)],
    ],
    ids=["large", "follower", "update", "no gradient", "replicas", "explained"],
)
def test_what_is_large_or_explained_or_of_another_check_is_decided(findings: list[Finding]) -> None:
    assert not are_undecided(findings)


def test_the_check_counts_them_as_inconclusive_and_is_no_mismatch() -> None:
    result = CheckResult(name=CheckName.GRADIENT, verdict="mismatch", tensors=25)
    aside = set_aside(result, [find(0.08), find(0.1)])
    assert (aside.verdict, aside.inconclusive) == ("pass", 2)
    other = CheckResult(name=CheckName.COVERAGE, verdict="pass", tensors=25)
    assert set_aside(other, [find(0.08)]) is other
