"""Stop of `--debug` on ranks: at the first finding about a tensor of this run."""

from typing import Any

import pytest

from moeverify.results.cause import Cause
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.facts import CollectiveFacts, Issue, ShardingFacts
from moeverify.results.finding import Finding, Wider
from moeverify.results.operation import Altered, Operation, Scaled
from moeverify.results.run import CaseResult, RankReport
from moeverify.results.trace import CollectiveRecord
from moeverify.verification.controller.debug import find_place, find_stop
from moeverify.verification.jobs import BlamedPlace, DifferingCollective

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


def make_result(verdict: Any, findings: tuple[Finding, ...] = (), **rest: Any) -> CaseResult:
    fields = {"name": "a", "file": "", "ranks": 3, "seconds": 1.0}
    return CaseResult(verdict=verdict, findings=findings, **fields | rest)


def make_differing(**rest: Any) -> CollectiveFacts:
    issues = (Issue(ranks=(0,), signature="b"), Issue(ranks=(1,), signature=None))
    fields = {
        "axis": "tp",
        "ranks": (0, 1),
        "number": 3,
        "issues": issues,
        "counts": {0: 3, 1: 2},
        "group": "7",
    }
    return CollectiveFacts(**fields | rest)


@pytest.mark.parametrize(
    ("facts", "about"),
    [
        (make_differing(), "collective #3 of tp group (0,1), in which they differ"),
        (make_differing(issues=()), "collective #3 of tp group (0,1), up to which they agree"),
    ],
)
def test_where_ranks_issue_different_collectives_they_stop_before_the_first(
    facts: CollectiveFacts, about: str
) -> None:
    differing = make_finding("", "tp group (0,1)", facts=facts)
    at = find_stop(make_result("mismatch", (differing, make_finding("loss", "lm"))))
    assert at is not None
    assert at.collective == DifferingCollective(about=about, facts=facts)
    following = make_finding("", "tp group (0,1)", facts=facts, follows="lm")
    at = find_stop(make_result("mismatch", (following, make_finding("loss", "lm"))))
    assert at is not None
    assert at.collective is None


@pytest.mark.parametrize("facts", [ShardingFacts(axis="tp"), ShardingFacts(axis="tp", is_unused=True)])
def test_an_axis_is_no_tensor_of_a_rank(facts: ShardingFacts) -> None:
    whole_axis = make_finding("initial_weight", "axis tp", facts=facts)
    assert find(whole_axis) == ""
    assert find(whole_axis, make_finding("loss", "lm")) == "loss lm at step 1"


def issue(number: int, signature: str, **rest: Any) -> CollectiveRecord:
    fields = {
        "op": signature,
        "group": (0, 2),
        "group_name": "7",
        "axis": "tp",
        "shape": (),
        "dtype": "float64",
    }
    moment = {
        "peer": -1,
        "site": "file.py:7 in backward",
        "state": "started",
        "started": 0.0,
        "seconds": None,
    }
    numbers = {"number": number + 5, "sequence": number, "num_tensors": 1}
    return CollectiveRecord(signature=signature, **fields | moment | numbers | rest)


def test_ranks_of_a_run_that_hung_stop_before_the_collective_in_which_they_differ() -> None:
    def report(rank: int, *recent: CollectiveRecord) -> RankReport:
        return RankReport(rank=rank, state="hung", recent=recent)

    same = issue(1, "a")
    reports = (report(0, same, issue(2, "b")), report(1), report(2, same, issue(2, "c")))
    at = find_stop(make_result("error", rank_reports=reports))
    assert at is not None
    assert at.collective is not None
    facts = at.collective.facts
    assert (facts.group, facts.axis, facts.ranks, facts.number) == ("7", "tp", (0, 2), 2)
    assert [(each.ranks, each.signature) for each in facts.issues] == [((0,), "b"), ((2,), "c")]
    assert facts.counts == {0: 2, 2: 2}
    agreed = (report(0, same), report(1), report(2, same))
    assert find_stop(make_result("error", rank_reports=agreed)) is None


OF_GRADIENT = Subject(quantity=Quantity.GRADIENT, tensors=("a.weight",))


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
        (OF_GRADIENT, Altered(), None),
        (Subject(quantity=Quantity.MODULE_GRADIENT, tensors=("lm",)), Altered(), None),
    ],
)
def test_ranks_stop_at_the_module_that_the_cause_names(
    subject: Subject, operation: Operation, fields: dict[str, Any] | None
) -> None:
    place = find_place(Explanation(cause=Cause.FORWARD, subject=subject, operation=operation), 3)
    expected = None if fields is None else BlamedPlace(about=place.about if place else "", **fields)
    assert place == expected


@pytest.mark.parametrize(
    ("direction", "inner", "end"),
    [
        ("forward", "", "output"),
        ("forward", "b", "input"),  # the input of an inner module
        ("backward", "", "input"),
        ("backward", "b", "output"),  # the output gradient of an inner module
    ],
)
def test_the_end_of_a_module_where_ranks_differ(direction: Any, inner: str, end: str) -> None:
    assert BlamedPlace(about="it", module="a", direction=direction, inner=inner).end == end
