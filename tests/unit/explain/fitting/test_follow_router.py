"""Findings of a router's self-check follow from its known mistake, and otherwise stand alone."""

from __future__ import annotations

from moeverify.explain.fitting.diagnosis import _follow_router
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName, Kind
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.facts import RouterFacts
from moeverify.results.finding import Finding
from moeverify.results.operation import Altered, Operation, Zeroed


def make(check: CheckName, kind: Kind, tensor: str, **fields: object) -> Finding:
    base = {
        "check": check,
        "kind": kind,
        "tensor": tensor,
        "step": 0,
        "error": 9.0,
        "bound": 1.0,
        "rank": 0,
        "ranks": (0,),
        "code": "forward",
    }
    return Finding.model_validate(base | fields)


def make_origin(operation: Operation, module: str) -> Finding:
    subject = Subject(quantity=Quantity.OUTPUT, module=module)
    explanation = Explanation(cause=Cause.ROUTING, subject=subject, operation=operation)
    return make(CheckName.LOSS, Kind.LOSS, "z", explanation=explanation, code=Cause.ROUTING.value)


def test_a_place_follows_a_known_mistake_of_a_router() -> None:
    place = make(
        CheckName.ROUTER,
        Kind.ROUTER_WEIGHTS,
        "layers.2.moe.router",
        facts=RouterFacts(quantity="weights", num_wrong=3, num_tokens=8),
    )
    origin = make_origin(Zeroed(), "layers.1.moe.router")
    assert _follow_router(place, [origin], [place]).follows == "z"
    assert _follow_router(place, [make_origin(Altered(), "layers.1.moe.router")], [place]).follows == ""
    assert _follow_router(place, [make_origin(Zeroed(), "layers.1.attention")], [place]).follows == ""
