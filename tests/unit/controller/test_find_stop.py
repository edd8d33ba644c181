"""Where `--debug` stops ranks: at the first finding that is about a tensor of this run."""

from typing import Any

import pytest

from moeverify.controller.debug import find_place, find_stop
from moeverify.jobs import BlamedPlace
from moeverify.results.cause import Cause
from moeverify.results.collective import IssuedCollective
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.factor import Product
from moeverify.results.finding import Finding, Wider
from moeverify.results.operation import Altered, Operation, Scaled, Unmasked
from moeverify.results.run import CaseResult

NAMED = Wider(precision="float64", outcome="named")


def make_finding(kind: str, tensor: str, **rest: Any) -> Finding:
    fields = {"error": 1.0, "bound": 0.1, "expected": 1.0, "actual": 2.0, "index": (), "coordinates": {}}
    return Finding(check="gradient", kind=kind, tensor=tensor, step=1, rank=0, ranks=(0,), **fields | rest)


def find(*findings: Finding) -> str:
    case = CaseResult(
        name="a",
        file="",
        verdict="mismatch",
        ranks=2,
        seconds=1.0,
        recipe="r",
        layout="ep 2",
        findings=findings,
    )
    at = find_stop(case)
    return "" if at is None else f"{at.kind} {at.about}"


def test_what_follows_from_another_finding_comes_last():
    later = make_finding("gradient", "a", follows="b")
    assert find(later, make_finding("update", "b")) == "update b at step 1"
    assert find(later) == "gradient a at step 1"


def test_what_ranks_do_not_make_is_passed_over():
    assert find(make_finding("", "axis cp")) == ""
    assert find(make_finding("", "axis cp"), make_finding("loss", "lm")) == "loss lm at step 1"


def test_a_finding_of_a_run_in_a_wider_precision_is_not_made_in_this_one():
    own = make_finding("gradient", "a", wider=(NAMED,), follows="b")
    assert find(make_finding("loss", "b", wider=(NAMED,)), own) == "gradient a at step 1"


SITE = "/x/pack/file.py:7 in backward"
OF_GRADIENT = Subject(quantity=Quantity.GRADIENT, tensors=("a.weight",))
SUMMED = Unmasked(axes=(Product(times=("tp",)),), num_ranks=2, summed_by=f"all_reduce at {SITE}")
REDUCED = Scaled(
    contributions=(), reduced_again=IssuedCollective(direction="backward", op="all_reduce", site=SITE)
)


@pytest.mark.parametrize(
    ("subject", "operation", "fields"),
    [
        (Subject(quantity=Quantity.OUTPUT, module="a.moe"), Altered(), {"module": "a.moe"}),
        (
            Subject(quantity=Quantity.OUTPUT, module="a", inner="a.moe"),
            Altered(first_micro_batch=1),
            {"module": "a", "inner": "a.moe", "micro_batch": 1},
        ),
        (
            Subject(quantity=Quantity.MODULE_GRADIENT, module="a.moe"),
            Scaled(contributions=()),
            {"module": "a.moe", "direction": "backward"},
        ),
        (Subject(quantity=Quantity.OUTPUT, module="a"), SUMMED, {"site": SITE, "module": "a"}),
        (OF_GRADIENT, REDUCED, {"site": SITE}),
        (OF_GRADIENT, Altered(), None),
        (Subject(quantity=Quantity.MODULE_GRADIENT, tensors=("lm",)), Altered(), None),
    ],
)
def test_ranks_stop_at_the_module_or_collective_that_the_cause_names(
    subject: Subject, operation: Operation, fields: dict[str, Any] | None
) -> None:
    place = find_place(Explanation(cause=Cause.FORWARD, subject=subject, operation=operation), 3)
    expected = None if fields is None else BlamedPlace(about=place.about if place else "", **fields)
    assert place == expected


@pytest.mark.parametrize(
    ("direction", "inner", "end"),
    [
        ("forward", "", "output"),
        ("forward", "b", "input"),  # what an inner module takes
        ("backward", "", "input"),
        ("backward", "b", "output"),  # the gradient that comes back to an inner module
    ],
)
def test_the_end_of_a_module_where_ranks_differ(direction: Any, inner: str, end: str) -> None:
    assert BlamedPlace(about="it", module="a", direction=direction, inner=inner).end == end
