"""Values derived from a router's choice follow from it if the rule of the wrong choice is known."""

from __future__ import annotations

import pytest

from moeverify.explain.fitting.recomputed import merge_with_origins
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName, Kind
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.facts import RouterFacts
from moeverify.results.finding import Finding
from moeverify.results.operation import Altered, Miscounted, Operation, Zeroed

COUNTS = Miscounted(expected=374, actual=935, rank=0)


def make(check: CheckName, kind: Kind, tensor: str, **fields: object) -> Finding:
    numbers = {"step": 0, "error": 9.0, "bound": 1.0, "rank": 0, "ranks": (0,)}
    return Finding.model_validate({"check": check, "kind": kind, "tensor": tensor, **numbers, **fields})


def make_choice(rule: str | None, step: int = 0) -> Finding:
    facts = RouterFacts(quantity="choice", num_wrong=8, num_tokens=8, rule=rule)
    return make(
        CheckName.ROUTER, Kind.ROUTER_IDS, "layers.1.moe.router", facts=facts, code="routing", step=step
    )


def make_origin(operation: Operation, cause: Cause, module: str = "") -> Finding:
    quantity = Quantity.OUTPUT if module else Quantity.ROUTING_COUNT
    explanation = Explanation(
        cause=cause, subject=Subject(quantity=quantity, module=module), operation=operation
    )
    kind, check = (Kind.LOSS, CheckName.LOSS) if module else (Kind.ROUTER_COUNTS, CheckName.ROUTING)
    return make(check, kind, "layers.0.moe.router", explanation=explanation, code=cause.value)


@pytest.mark.parametrize(
    ("rule", "rivals", "module", "follows"),
    [
        ("with-bias", (), "layers.1.moe.router", True),
        ("with-bias", ("scale-twice",), "layers.1.moe.router", False),
        (None, (), "layers.1.moe.router", False),
        ("with-bias", (), "layers.2.moe.router", False),
    ],
)
def test_what_a_router_computes_otherwise_follows_from_its_whole_rule(
    rule: str | None, rivals: tuple[str, ...], module: str, follows: bool
) -> None:
    facts = RouterFacts(quantity="weights", num_wrong=8, num_tokens=8, rule=rule, rivals=rivals)
    weights = make(CheckName.ROUTER, Kind.ROUTER_WEIGHTS, "layers.1.moe.router", facts=facts, code="forward")
    (origin,), _ = merge_with_origins([make_origin(Altered(), Cause.FORWARD, module)], [weights])
    assert bool(origin.follows) is follows


@pytest.mark.parametrize(
    ("rule", "operation", "module", "follows"),
    [
        ("best-5", COUNTS, "", True),
        ("without-bias", COUNTS, "", True),
        (None, COUNTS, "", False),
        ("best-5", Altered(), "layers.1.moe.dispatcher", True),
        ("best-5", Altered(), "layers.1.moe", True),
        ("best-5", Altered(), "layers.0.moe.dispatcher", False),
        ("best-5", Altered(), "layers.1.attention", False),
        ("best-5", Zeroed(), "layers.1.moe.dispatcher", True),
        ("without-bias", Zeroed(), "layers.1.moe.dispatcher", False),
    ],
)
def test_what_a_choice_makes_follows_from_it(
    rule: str | None, operation: Operation, module: str, *, follows: bool
) -> None:
    cause = Cause.FORWARD if module else Cause.STATE
    origins, known = merge_with_origins([make_origin(operation, cause, module)], [make_choice(rule)])
    assert (origins[0].follows == "layers.1.moe.router") is follows
    if follows:
        assert not known[0].follows


def test_a_choice_of_a_later_step_leads_nothing() -> None:
    origins, _ = merge_with_origins([make_origin(COUNTS, Cause.STATE)], [make_choice("best-5", step=1)])
    assert not origins[0].follows
