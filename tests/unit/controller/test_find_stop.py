"""Where `--debug` stops ranks: at the first finding that is about a tensor of this run."""

from typing import Any

from moeverify.controller.debug import find_stop
from moeverify.results.finding import Finding, Wider
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
