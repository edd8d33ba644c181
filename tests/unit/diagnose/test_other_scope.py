"""A balance loss that is taken over other tokens at a time than it should."""

from __future__ import annotations

from dataclasses import replace

import pytest
from wrong_tensors import (
    PARAMETERS,
    combine,
    draw,
    find_hypothesis,
    make_components,
    make_inputs,
    make_tensor,
)

from moeverify.diagnose.hypotheses.base import Outcome
from moeverify.results.operation import Rescoped

OTHER = {name: 1e-3 * draw(40, seed=seed) for seed, name in enumerate(PARAMETERS, 5)}
COMPONENTS = replace(make_components(), by_scope=lambda: {"batch": OTHER})


def ask(times: float, seed: int | None = None) -> Outcome:
    """Return what is said where so many times the other term is in the place of the right one."""
    tensors = []
    for each in combine(COMPONENTS, lambda term, cell: float(term != "balance")):
        added = OTHER[each.name] if seed is None else 1e-3 * draw(40, seed=seed)
        wrong = each.whole + times * added
        tensors.append(make_tensor(each.expected, wrong, wrong, name=each.name))
    return find_hypothesis("other_scope").test(tensors, make_inputs(*tensors, components=COMPONENTS))


def test_the_term_of_another_scope_in_the_place_of_the_right_one() -> None:
    explanation = ask(1.0).explanation
    assert explanation is not None
    assert explanation.operation == Rescoped(term="balance", scope="batch")


@pytest.mark.parametrize(("times", "seed"), [(2.0, None), (0.0, None), (1.0, 9)])
def test_another_multiple_or_another_term_is_refused(times: float, seed: int | None) -> None:
    (trial,) = ask(times, seed).trials
    assert trial.verdict == "no"
