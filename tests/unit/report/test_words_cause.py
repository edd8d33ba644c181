"""Sentences on causes and places: one for each operation on each quantity that has it."""

from __future__ import annotations

from typing import get_args

import pytest
from factor_sentences import FACTORS
from layout_sentences import LAYOUTS
from norm_sentences import NORMS
from operation_sentences import OPERATIONS
from value_sentences import VALUES

from moeverify.report.words.cause import describe_explanation, describe_place
from moeverify.results.explanation import Explanation
from moeverify.results.operation import Operation

SENTENCES = [*FACTORS, *VALUES, *OPERATIONS, *NORMS, *LAYOUTS]


@pytest.mark.parametrize(("explanation", "cause", "where"), SENTENCES)
def test_a_cause_and_its_place_are_each_one_sentence(
    explanation: Explanation, cause: str, where: str
) -> None:
    assert (describe_explanation(explanation), describe_place(explanation)) == (cause, where)


def test_every_operation_has_words() -> None:
    union, _ = get_args(Operation)
    assert {type(explanation.operation) for explanation, *_ in SENTENCES} == set(get_args(union))
