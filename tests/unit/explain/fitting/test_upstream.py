"""Causes with matching gradients are withdrawn if an equal error in gradients could go unseen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from wrong_tensors import draw, make_inputs, make_tensor

from moeverify.explain.fitting.upstream import doubt_causes
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName, Kind
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.factor import Factor
from moeverify.results.finding import Finding
from moeverify.results.operation import Scaled, Unmoved
from moeverify.results.part import WHOLE, Contribution
from moeverify.results.upstream import OffUpstream

LIMITS = {CheckName.GRADIENT: 0.244, CheckName.CLIP: 1e-5}
KINDS = {
    Quantity.GRADIENT_NORM: (Kind.GRADIENT_NORM, Cause.NORM),
    Quantity.UPDATE: (Kind.UPDATE, Cause.SCALE),
    Quantity.LOSS: (Kind.LOSS, Cause.METRIC),
}


def make_finding(
    quantity: Quantity, factor: float, *, check: str = "gradient norm", step: int = 0
) -> Finding:
    kind, cause = KINDS[quantity]
    operation = Scaled(contributions=(Contribution(part=WHOLE, factor=Factor(value=factor)),))
    subject = Subject(quantity=quantity, tensors=("total",))
    explanation = Explanation(cause=cause, subject=subject, operation=operation)
    values = {"expected": 1.2, "actual": 1.2 * factor, "error": abs(factor - 1.0), "bound": 0.009}
    named = {"check": check, "kind": kind, "tensor": "total", "step": step, "rank": 0, "code": cause}
    return Finding.model_validate({**named, **values, "explanation": explanation})


def doubt(*findings: Finding, limits: dict[CheckName, float] = LIMITS) -> list[OffUpstream | None]:
    inputs = replace(make_inputs(make_tensor(draw(2), draw(2))), limits=limits)
    operations = [each.explanation.operation for each in doubt_causes(findings, inputs) if each.explanation]
    return [each if isinstance(each, OffUpstream) else None for each in operations]


@pytest.mark.parametrize("factor", [0.9895, 1.3, 4.0])
def test_a_norm_of_the_ranks_own_gradients_says_that_these_are_wrong(factor: float) -> None:
    (told,) = doubt(make_finding(Quantity.GRADIENT_NORM, factor))
    assert told is not None
    assert told.is_sure


def test_a_norm_that_is_not_that_of_the_gradients_is_wrong_by_itself() -> None:
    apart = make_finding(Quantity.GRADIENT_NORM, 0.9895, check=CheckName.CLIP)
    assert doubt(make_finding(Quantity.GRADIENT_NORM, 0.9895), apart) == [None, None]
    # Another step says nothing about this one.
    later = make_finding(Quantity.GRADIENT_NORM, 0.9895, check=CheckName.CLIP, step=1)
    assert doubt(make_finding(Quantity.GRADIENT_NORM, 0.9895), later)[0] is not None


def test_without_a_check_of_the_norm_what_gradients_may_hide_is_open() -> None:
    limits = {CheckName.GRADIENT: 0.244}
    (told,) = doubt(make_finding(Quantity.GRADIENT_NORM, 0.9), limits=limits)
    assert told is not None
    assert not told.is_sure
    assert doubt(make_finding(Quantity.GRADIENT_NORM, 0.5), limits=limits) == [None]


@pytest.mark.parametrize("quantity", [Quantity.UPDATE, Quantity.LOSS])
def test_updates_and_losses_are_open_as_far_as_gradients_hide_it(quantity: Quantity) -> None:
    near, far = make_finding(quantity, 0.9, check="update"), make_finding(quantity, 2.0, check="update")
    told = doubt(near, far)
    assert told[0] is not None
    assert not told[0].is_sure
    assert told[1] is None


def test_where_gradients_hide_nothing_every_cause_is_kept() -> None:
    sharp = {CheckName.GRADIENT: 1e-10}
    findings = [make_finding(quantity, 1.001) for quantity in KINDS]
    assert doubt(*findings, limits=sharp) == [None] * 3


def test_weights_that_do_not_move_say_nothing_of_the_size_of_gradients() -> None:
    still = make_finding(Quantity.UPDATE, 0.9)
    assert still.explanation is not None
    explanation = still.explanation.model_copy(update={"operation": Unmoved()})
    assert doubt(still.model_copy(update={"explanation": explanation})) == [None]
