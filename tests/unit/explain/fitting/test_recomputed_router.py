"""Relation of a wrong gradient inside a router to the golden and the reported losses of the same step."""

from __future__ import annotations

import pytest

from moeverify.explain.fitting.recomputed import join_alike, merge_with_origins
from moeverify.report.words.cause import describe_cause
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName, Kind
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.factor import Factor
from moeverify.results.facts import ObjectiveFacts, RouterGradientFacts
from moeverify.results.finding import Finding
from moeverify.results.operation import Altered, Scaled
from moeverify.results.part import WHOLE, Contribution
from moeverify.results.place import Place

ROUTER = "layers.2.moe.router"


def make(check: CheckName, kind: Kind, tensor: str, **fields: object) -> Finding:
    return Finding.model_validate(
        {"check": check, "kind": kind, "tensor": tensor, "step": 0, "rank": 0, "error": 1.0, "bound": 0.1}
        | fields
    )


def gradient(term: str = "balance", code: Cause = Cause.TERM_SCALE, **facts: object) -> Finding:
    given = RouterGradientFacts.model_validate({"term": term, "factors": {0: 0.5, 1: 0.5}} | facts)
    return make(
        CheckName.ROUTER_GRADIENT,
        Kind.GRADIENT,
        f"{ROUTER}.weight",
        code=code,
        facts=given,
        place=Place(module=ROUTER),
    )


def unknown() -> Finding:
    return gradient("combine", Cause.FORWARD, factors={0: None}, in_router=True)


def loss(term: str = "balance") -> Finding:
    return make(CheckName.OBJECTIVE, Kind.LOSS, term, facts=ObjectiveFacts())


def origin(cause: Cause, subject: Subject, kind: Kind = Kind.GRADIENT) -> Finding:
    operation = Scaled(contributions=(Contribution(part=WHOLE, factor=Factor(value=2.0)),))
    explanation = Explanation(
        cause=cause, subject=subject, operation=operation if cause is Cause.METRIC else Altered()
    )
    check = CheckName.LOSS if kind == Kind.LOSS else CheckName.GRADIENT
    return make(check, kind, "balance" if kind == Kind.LOSS else "a", explanation=explanation, code=cause)


REPORTED = origin(Cause.METRIC, Subject(quantity=Quantity.LOSS, tensors=("balance",)), Kind.LOSS)
COMPUTED = origin(Cause.FORWARD, Subject(quantity=Quantity.LOSS, tensors=("balance",)))
OTHER_LOSS = origin(Cause.FORWARD, Subject(quantity=Quantity.LOSS, tensors=("lm",)))
AROUND = origin(Cause.BACKWARD, Subject(quantity=Quantity.MODULE_GRADIENT, module="layers.2"))
ELSEWHERE = origin(Cause.BACKWARD, Subject(quantity=Quantity.MODULE_GRADIENT, module="layers.2.attention"))


@pytest.mark.parametrize(
    ("before", "finding", "leads"),
    [
        (REPORTED, gradient(), True),
        (REPORTED, gradient(code=Cause.FORWARD), True),
        (REPORTED, gradient("z"), False),
        (COMPUTED, gradient("balance padding", Cause.PADDING), True),
        (COMPUTED, gradient(code=Cause.FORWARD), False),
        (OTHER_LOSS, gradient(), False),
        (AROUND, gradient(), True),
        (AROUND, unknown(), False),
        (ELSEWHERE, gradient(), False),
    ],
)
def test_what_tells_more_leads(before: Finding, finding: Finding, leads: bool) -> None:
    (merged,), _ = merge_with_origins([before], [finding])
    assert merged.follows == (finding.tensor if leads else "")
    assert (merged.explanation is None) == leads


def test_a_reported_loss_follows_from_its_gradient() -> None:
    found = join_alike([loss(), loss("z"), gradient()])
    assert [finding.follows for finding in found] == [f"{ROUTER}.weight", "", ""]


def test_a_gradient_that_nothing_explains_follows_from_the_loss_that_is_computed_otherwise() -> None:
    reported, wrong = join_alike([loss(), unknown()])
    assert (reported.follows, reported.code) == ("", Cause.FORWARD)
    assert wrong.follows == "balance"


def test_a_gradient_that_nothing_explains_follows_from_one_that_something_does() -> None:
    wrong, known = join_alike([unknown(), gradient()])
    assert (wrong.follows, known.follows) == (known.tensor, "")


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"factors": {0: 0.0}}, "the balance loss has no gradient in the router"),
        (
            {"factors": {0: 1.5, 1: 3.0}, "in_router": True},
            "passes the gradient of the balance loss on to its weight 1.5 times on rank 0 and 3 times on rank 1",
        ),
        (
            {"term": "z padding", "factors": {0: 1.0}},
            "tokens of padding take part in the gradient of the z loss",
        ),
        (
            {"term": "combine", "factors": {0: None}, "in_router": True},
            "the gradient of the router's weight does not follow from its input and its output gradient",
        ),
    ],
)
def test_the_cause_says_what_happens_to_which_loss(facts: dict[str, object], said: str) -> None:
    assert said in describe_cause(gradient(**facts))  # type: ignore[arg-type]
