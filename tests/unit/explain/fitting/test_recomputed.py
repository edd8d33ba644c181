"""Relations of findings on recomputed values to each other and to those of the comparison with the golden."""

from __future__ import annotations

import pytest

from moeverify.explain.fitting.recomputed import join_alike, merge_with_origins
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName, Kind
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.factor import Factor
from moeverify.results.finding import Finding
from moeverify.results.operation import Operation, Rounded, Scaled, Unmoved
from moeverify.results.part import WHOLE, Contribution
from moeverify.results.step_facts import RecomputedFacts, TermFacts


def find(tensor: str, factor: float = 0.0, step: int = 0, check: str = CheckName.OPTIMIZER_STEP) -> Finding:
    return Finding(
        check=check,
        kind=Kind.UPDATE,
        tensor=tensor,
        step=step,
        rank=0,
        error=1.0,
        bound=0.1,
        code=Cause.OPTIMIZER,
        facts=RecomputedFacts(terms=(TermFacts(name="weight decay", expected=-0.1, found=-0.1 * factor),)),
    )


def compare(tensor: str, explanation: Explanation | None = None) -> Finding:
    return Finding(
        check=CheckName.UPDATE,
        kind=Kind.UPDATE,
        tensor=tensor,
        step=0,
        rank=0,
        error=1.0,
        bound=0.1,
        explanation=explanation,
        unexplained=() if explanation else (tensor,),
    )


def test_tensors_that_are_wrong_alike_are_one_cause() -> None:
    found = join_alike([find("a"), find("b"), find("c", factor=2.0), find("a", step=1)])
    assert [finding.follows for finding in found] == ["", "a", "", "a"]


def test_what_the_golden_cannot_explain_follows_from_what_was_recomputed() -> None:
    origins, recomputed = merge_with_origins([compare("a")], [find("b")])
    assert [finding.follows for finding in (*origins, *recomputed)] == ["b", ""]


def test_what_the_golden_explains_stays_the_cause() -> None:
    subject = Subject(quantity=Quantity.UPDATE, tensors=("a",))
    explanation = Explanation(cause=Cause.SHARE_WEIGHTS, subject=subject, operation=Scaled(contributions=()))
    origins, recomputed = merge_with_origins([compare("a", explanation)], [find("b")])
    assert [finding.follows for finding in (*origins, *recomputed)] == ["", "a"]


@pytest.mark.parametrize(
    ("cause", "operation"),
    [
        (Cause.ROUNDING, Rounded(dtype="bfloat16")),
        (Cause.SCALE, Scaled(contributions=(Contribution(part=WHOLE, factor=Factor(value=0.2)),))),
    ],
)
def test_terms_that_are_measured_say_more_than_how_far_an_update_is_off(
    cause: Cause, operation: Operation
) -> None:
    subject = Subject(quantity=Quantity.UPDATE, tensors=("a",))
    explanation = Explanation(cause=cause, subject=subject, operation=operation)
    measured, unknown = find("b"), find("b")
    unknown = unknown.model_copy(
        update={"facts": RecomputedFacts(terms=(TermFacts(name="step", expected=-0.1),))}
    )
    origins, recomputed = merge_with_origins([compare("a", explanation)], [measured])
    assert [finding.follows for finding in (*origins, *recomputed)] == ["b", ""]
    origins, recomputed = merge_with_origins([compare("a", explanation)], [unknown])
    assert [finding.follows for finding in (*origins, *recomputed)] == ["", "a"]


def test_another_step_is_another_cause() -> None:
    origins, recomputed = merge_with_origins([compare("a")], [find("b", step=1)])
    assert [finding.follows for finding in (*origins, *recomputed)] == ["", ""]


def test_a_later_step_of_the_same_bug_stays_the_same_bug() -> None:
    recomputed = join_alike([find("b"), find("a", step=1)])
    late = compare("a").model_copy(update={"step": 1})
    origins, _ = merge_with_origins([late], recomputed)
    assert [finding.follows for finding in origins] == ["b"]


@pytest.mark.parametrize(("factor", "follows"), [(0.7458, "a"), (0.9, "")])
def test_factors_that_differ_by_rounding_are_one_bug(factor: float, follows: str) -> None:
    joined = join_alike([find("a", factor=0.7502), find("b", factor=factor)])
    assert [finding.follows for finding in joined] == ["", follows]


@pytest.mark.parametrize(("rate", "follows"), [(0.0, "b"), (None, "")])
def test_an_update_that_is_zero_since_the_rate_is_follows_from_the_rate(
    rate: float | None, follows: str
) -> None:
    subject = Subject(quantity=Quantity.UPDATE, tensors=("a",))
    explanation = Explanation(cause=Cause.STALE, subject=subject, operation=Unmoved())
    terms = (TermFacts(name="step", expected=-0.1, found=0.0),)
    facts = RecomputedFacts(terms=terms, rate=rate, scheduled=0.1)
    measured = find("b").model_copy(update={"facts": facts})
    origins, _ = merge_with_origins([compare("a", explanation)], [measured])
    assert [finding.follows for finding in origins] == [follows]


@pytest.mark.parametrize(("step", "follows"), [(0, ""), (1, "a.momentum_buffer"), (2, "a.momentum_buffer")])
def test_an_update_of_a_later_step_too_is_made_of_moments_before_they_were_rounded(
    step: int, follows: str
) -> None:
    rounded = find("a.momentum_buffer", step=1).model_copy(
        update={
            "kind": Kind.OPTIMIZER_STATE,
            "facts": RecomputedFacts(terms=(), rounded_to="bfloat16", is_rounding_sure=True),
        }
    )
    update = find("b", step=step).model_copy(
        update={"facts": RecomputedFacts(terms=(TermFacts(name="gradient", expected=1.0),))}
    )
    assert [finding.follows for finding in join_alike([rounded, update])] == ["", follows]
