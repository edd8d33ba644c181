"""Two runs side by side: differences that count as a change, and others."""

from __future__ import annotations

from typing import Any

import pytest

from moeverify.report.changes import compare_runs, render_changes, same_verdicts
from moeverify.results.finding import CheckResult, Worst


def make_check(error: float, bound: float = 1e-10, tensors: int = 5, verdict: str = "pass") -> CheckResult:
    content = {"name": "gradient", "verdict": verdict, "tensors": tensors}
    return CheckResult.model_validate({**content, "worst": Worst(tensor="w", error=error, bound=bound)})


def test_equal_runs_have_no_changes(make_run: Any) -> None:
    assert compare_runs(make_run(), make_run()) == []


def test_verdicts_and_cases(make_run: Any, make_case: Any) -> None:
    before = make_run(make_case("a"), make_case("b"))
    after = make_run(make_case("a", "mismatch"), make_case("c"))
    changes = compare_runs(before, after)
    told = [(change.kind, change.subject, change.before, change.after) for change in changes]
    assert ("verdict", "a", "pass", "mismatch") in told
    assert ("case", "b", "pass", "not there") in told
    assert ("case", "c", "not there", "pass") in told
    assert not same_verdicts(changes)
    assert not same_verdicts([change for change in changes if change.kind == "case"])


@pytest.mark.parametrize(
    ("before", "after", "kinds"),
    [
        (make_check(1e-12), make_check(9e-12), set()),
        (make_check(1e-12), make_check(2e-11), {"error"}),
        (make_check(2e-11), make_check(1e-12), {"error"}),
        (make_check(0.0), make_check(1e-15), set()),  # noise to each other
        (make_check(0.0), make_check(5e-12), {"error"}),
        (make_check(1e-12), make_check(float("nan"), verdict="mismatch"), {"error", "check"}),
        (make_check(1e-12), make_check(1e-8, bound=1e-6), {"bound"}),  # the share of the bound is the same
        (make_check(1e-12), make_check(1e-12, tensors=4), {"coverage"}),
        (make_check(0.0, bound=0.0), make_check(1e-17, bound=0.0, verdict="mismatch"), {"error", "check"}),
    ],
)
def test_checks(
    make_run: Any, make_case: Any, before: CheckResult, after: CheckResult, kinds: set[str]
) -> None:
    changes = compare_runs(make_run(make_case(checks=[before])), make_run(make_case(checks=[after])))
    assert {change.kind for change in changes} == kinds
    assert same_verdicts(changes)


def test_factor_is_the_users(make_run: Any, make_case: Any) -> None:
    before, after = (make_run(make_case(checks=[make_check(error)])) for error in (1e-12, 3e-12))
    assert compare_runs(before, after) == []
    assert [change.kind for change in compare_runs(before, after, factor=2.0)] == ["error"]


def test_checks_that_only_one_run_makes(make_run: Any, make_case: Any) -> None:
    before = make_run(make_case(checks=[make_check(0.0)]))
    after = make_run(make_case(checks=[]))
    assert [change.after for change in compare_runs(before, after)] == ["not made"]
    assert [change.before for change in compare_runs(after, before)] == ["not made"]


def test_recipe_time_and_environment(make_run: Any, make_case: Any) -> None:
    before = make_run(make_case(seconds=2.0), environment={"torch": "2.11", "gpu": "none"})
    after = make_run(make_case(seconds=9.0, recipe="other"), environment={"torch": "2.13"})
    changes = compare_runs(before, after)
    told = {(change.kind, change.subject): (change.before, change.after) for change in changes}
    assert told == {
        ("recipe", "fsdp2-ep-4 recipe"): ("stress-adamw", "other"),
        ("seconds", "fsdp2-ep-4"): ("2.0 s", "9.0 s"),
        ("environment", "torch"): ("2.11", "2.13"),
        ("environment", "gpu"): ("none", "not known"),
    }


def test_small_times_are_no_news(make_run: Any, make_case: Any) -> None:
    assert compare_runs(make_run(make_case(seconds=0.1)), make_run(make_case(seconds=0.9))) == []


def test_rendering_says_whether_verdicts_are_the_same(make_run: Any, make_case: Any, print_at: Any) -> None:
    before, after = make_run(make_case("a")), make_run(make_case("a", "mismatch"))

    def show(old: Any, new: Any) -> str:
        changes = compare_runs(old, new)
        return str(print_at(lambda console: render_changes(changes, old, new, console), terminal=False))

    assert show(before, before).startswith("same verdicts; 0 changes; 1 -> 1 case")
    text = show(before, after)
    assert "  a  pass -> mismatch" in text
    assert "verdicts differ" in text.splitlines()[-1]
