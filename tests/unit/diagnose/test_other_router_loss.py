"""A balance loss that is made of other probabilities, or of another choice of experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
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
from moeverify.results.cause import Cause
from moeverify.results.change import Change
from moeverify.results.operation import Redefined
from moeverify.results.trial import Reason
from moeverify.train.subject import Vector

SINGLE = {(Change(part="probabilities", way=way),): seed for way, seed in (("logits", 5), ("chosen", 15))}
BOTH = (Change(part="probabilities", way="chosen"), Change(part="counts", way="first"))


def make_term(seed: int) -> Vector:
    return {name: 1e-3 * draw(40, seed=seed + number) for number, name in enumerate(PARAMETERS)}


def list_variants(term: str, num_changes: int) -> Iterator[tuple[tuple[Change, ...], Vector]]:
    known = SINGLE if num_changes == 1 else {BOTH: 25}
    yield from ((changes, make_term(seed)) for changes, seed in known.items())


COMPONENTS = replace(make_components(), by_variant=list_variants)


def ask(seed: int, times: float = 1.0, *, loss_differs: bool = True) -> Outcome:
    """Return what is said where so many times the term of a seed is in the place of the right one."""
    tensors, added = [], make_term(seed)
    for each in combine(COMPONENTS, lambda term, cell: float(term != "balance")):
        wrong = each.whole + times * added[each.name]
        tensors.append(make_tensor(each.expected, wrong, wrong, name=each.name))
    right, other = torch.tensor(1.0, dtype=torch.float64), torch.tensor(1.5, dtype=torch.float64)
    losses = [make_tensor(right, other, other, name="balance", kind="loss")] if loss_differs else []
    inputs = make_inputs(*tensors, *losses, components=COMPONENTS)
    return find_hypothesis("other_router_loss").test(tensors, inputs)


@pytest.mark.parametrize(("changes", "seed"), [*SINGLE.items(), (BOTH, 25)])
def test_the_variant_whose_term_is_in_the_gradients_is_named(changes: tuple[Change, ...], seed: int) -> None:
    explanation = ask(seed).explanation
    assert explanation is not None
    assert explanation.cause is Cause.FORWARD
    assert explanation.subject.tensors == ("balance",)
    assert explanation.operation == Redefined(term="balance", variants=(changes,))


@pytest.mark.parametrize(("seed", "times"), [(35, 1.0), (5, 1.37), (5, 0.0)])
def test_another_term_or_another_multiple_is_refused(seed: int, times: float) -> None:
    (trial,) = ask(seed, times).trials
    assert trial.verdict == "no"


def test_a_loss_of_the_right_value_has_the_right_formula() -> None:
    (trial,) = ask(5, loss_differs=False).trials
    assert (trial.verdict, trial.reason) == ("untried", Reason.LOSSES_MATCH)


def test_a_number_of_the_run_times_another_term_is_named_with_it() -> None:
    explanation = ask(5, 2.0).explanation
    assert explanation is not None
    operation = explanation.operation
    assert isinstance(operation, Redefined)
    assert operation.factor is not None
    assert (operation.factor.value, bool(operation.factor.equals)) == (pytest.approx(2.0), True)
