"""The cause of a whole finding: with measured values, without an explanation, or from an older file."""

from __future__ import annotations

from typing import Any

import pytest

from moeverify.report.words.cause import describe_cause, describe_where
from moeverify.results.cause import Cause
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.finding import Finding
from moeverify.results.observation import ScalarValues
from moeverify.results.operation import Altered

LOADED = Explanation(
    cause=Cause.STATE, subject=Subject(quantity=Quantity.LOADED, tensors=("w",)), operation=Altered()
)


def find(**fields: Any) -> Finding:
    content = {"check": "loaded", "tensor": "w", "step": 0, "rank": 1, "error": 1.0, "bound": 0.0}
    return Finding.model_validate(content | fields)


def test_a_number_that_was_loaded_wrong_is_told_by_both_values() -> None:
    finding = find(
        explanation=LOADED,
        observations=(ScalarValues(expected=0.1, actual=0.0, rank=1),),
    )
    assert describe_cause(finding) == "it is 0, and 0.1 was saved"


@pytest.mark.parametrize(
    ("unexplained", "cause"),
    [
        (("a", "b", "c"), "unknown: no hypothesis explains these 3 tensors"),
        (("a",), "unknown: no hypothesis explains it"),
        ((), ""),
    ],
)
def test_what_nothing_explains_is_unknown(unexplained: tuple[str, ...], cause: str) -> None:
    assert describe_cause(find(unexplained=unexplained)) == cause


def test_a_finding_of_an_older_file_keeps_its_words() -> None:
    finding = find(cause="every value is twice the right one", where="axis tp")
    assert (describe_cause(finding), describe_where(finding)) == (
        "every value is twice the right one",
        "axis tp",
    )
