"""A pass needs evidence: which cases are undecided, and what a wider precision makes of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from moeverify.cases.schema import Case
from moeverify.faults.setting import make_case
from moeverify.report.words.note import describe_undecided
from moeverify.results.checks import CheckName
from moeverify.results.decided import Decided, count_decided
from moeverify.results.facts import DtypeFacts, DtypeUse, ReplayedModules
from moeverify.results.finding import CheckResult, Finding, find_undecided
from moeverify.results.run import CaseResult
from moeverify.verification.checks.base import CheckOutcome
from moeverify.verification.checks.limits import apply_limits
from moeverify.verification.checks.registry import CHECKS
from moeverify.verification.controller.escalation import (
    choose_confirming,
    confirm,
    find_confirming,
    merge,
)
from moeverify.verification.controller.run import find_overall_verdict

REASON = "gradient: 0 of 4 tensors decided at 20 %"
DIFFERENT = Finding(check="gradient", kind="gradient", tensor="w", step=0, rank=0, error=1.0, bound=0.1)


def judge(verdict: Any, *findings: Finding, reason: str = "") -> CaseResult:
    return CaseResult(
        name="c", file="c.yaml", verdict=verdict, reason=reason, ranks=2, seconds=1.0, findings=findings
    )


UNDECIDED = judge("undecided", reason=REASON)


def in_precision(precision: str, parallelize: str = "", float8: str = "none") -> Case:
    own = {"parallelize": parallelize} if parallelize else {}
    return make_case("c", recipe={"precision": precision, "float8": float8}, dp_shard=2, **own)


def measure(name: str, limits: dict[str, float]) -> tuple[Any, CheckOutcome]:
    check = next(check for check in CHECKS if check.name == name)
    result = CheckResult(name=name, verdict="pass", tensors=len(limits))
    return check, CheckOutcome(
        result, (), {(0, name.partition(" ")[0], tensor): limit for tensor, limit in limits.items()}
    )


@pytest.mark.parametrize(("wide", "is_enough"), [(0, True), (1, True), (2, False), (20, False)])
def test_a_pass_needs_95_percent_of_the_tensors_decided_at_20_percent(wide: int, is_enough: bool) -> None:
    counts = count_decided([0.2] * (20 - wide) + [0.21] * wide)
    assert (counts.tensors, counts.decided, counts.is_enough) == (20, 20 - wide, is_enough)
    check = CheckResult(name="gradient", verdict="pass", tensors=20, decided=counts)
    assert bool(find_undecided([check])) is not is_enough


def test_a_limit_that_is_no_number_decides_nothing() -> None:
    assert count_decided([math.nan, math.inf]).decided == 0


def test_a_tensor_that_another_check_decides_is_decided() -> None:
    wide = {"a": 3.0, "b": 0.3, "c": 0.1}
    (gradient,) = apply_limits([measure("gradient", wide)])
    assert gradient.decided == Decided(tensors=3, decided=1, limit=1.65, worst=3.0)
    gradient, other = apply_limits([measure("gradient", wide), measure("gradient sum", {"a": 0.01})])
    assert gradient.decided == Decided(tensors=3, decided=2, limit=0.3, worst=0.3)
    assert other.decided is None


def test_a_gradient_that_is_zero_but_for_rounding_needs_no_evidence_and_nor_does_its_update() -> None:
    check, outcome = measure("gradient", {"k.bias": 1e9, "w": 0.1, "v": 1e9, "b": 0.1})
    outcome = replace(outcome, vanishing=frozenset({"k.bias", "b"}))
    gradient, update = apply_limits([(check, outcome), measure("update", {"w": 0.1, "other": 9.0})])
    assert gradient.decided == Decided(tensors=3, decided=2, limit=1e9, worst=1e9)
    assert update.decided == Decided(tensors=2, decided=1, limit=9.0, worst=9.0)
    _, update = apply_limits([(check, outcome), measure("update", {"w": 0.1, "k.bias": 9.0})])
    assert update.decided == Decided(tensors=1, decided=1)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (
            [0.1, 3.0, 3.22, 6.0],
            "gradient: 1 of 4 tensors decided at 20 %; in the others an error below 322 % (median, at most 600 %) "
            "may not have been seen",
        ),
        ([math.inf], "gradient: 0 of 1 tensors decided at 20 %; no error would have been seen in them"),
    ],
)
def test_one_line_says_what_was_decided(limits: list[float], words: str) -> None:
    check = CheckResult(name="gradient", verdict="pass", tensors=4, decided=count_decided(limits))
    assert describe_undecided([check]) == words


def test_a_run_is_undecided_if_a_case_is_and_none_failed() -> None:
    assert find_overall_verdict([judge("pass"), UNDECIDED]) == "undecided"
    assert find_overall_verdict([judge("mismatch"), UNDECIDED]) == "mismatch"


@pytest.mark.parametrize(
    ("case", "precision"),
    [
        (in_precision("bfloat16", "own:shard"), "float32"),
        (in_precision("float32", "own:shard"), "float64"),
        (in_precision("float64", "own:shard"), None),
        (in_precision("bfloat16"), "float64"),
        (in_precision("bfloat16", float8="rowwise_with_gw_hp"), "float64"),
    ],
)
def test_an_undecided_case_runs_in_a_wider_precision(case: Case, precision: str | None) -> None:
    wide = choose_confirming(case, UNDECIDED, find_confirming([case], []))
    assert (None if wide is None else wide.recipe.precision) == precision


def test_a_decided_pass_of_a_users_model_costs_no_further_run() -> None:
    case = in_precision("bfloat16", "own:shard")
    assert choose_confirming(case, judge("pass"), find_confirming([case], [])) is None


def test_a_wider_run_that_passes_decides_an_undecided_case() -> None:
    told = confirm(UNDECIDED, "float32", judge("pass"))
    assert (told.verdict, told.reason, told.decided_in) == ("pass", "", "float32")
    assert told.notes == (f"decided in float32, where it passes; in its own precision {REASON}",)


def test_a_wider_run_that_differs_is_a_mismatch_of_an_undecided_case() -> None:
    told = confirm(UNDECIDED, "float32", judge("mismatch", DIFFERENT))
    assert (told.verdict, told.findings[0].is_of_wider_run) == ("mismatch", True)


@pytest.mark.parametrize("verdict", ["undecided", "error", "skipped"])
def test_a_wider_run_without_a_verdict_decides_nothing(verdict: str) -> None:
    told = confirm(UNDECIDED, "float32", judge(verdict, reason="why"))
    assert (told.verdict, told.reason, told.decided_in) == ("undecided", REASON, "")
    assert "why" in told.notes[-1]


def make_narrow(dtype: str) -> Finding:
    facts = DtypeFacts(
        use=DtypeUse.COMPUTES,
        module="head",
        dtype=dtype,
        wanted="float32",
        parameters=("head.weight",),
        num_known=2,
    )
    return DIFFERENT.model_copy(update={"check": "precision", "tensor": "head", "facts": facts})


def test_a_wider_run_that_computes_in_the_dtype_of_the_case_decides_nothing() -> None:
    told = confirm(UNDECIDED, "float32", judge("mismatch", DIFFERENT, make_narrow("bfloat16")), "bfloat16")
    assert (told.verdict, told.findings) == ("undecided", ())
    assert "float32 decides nothing" in told.notes[-1]
    told = confirm(UNDECIDED, "float32", judge("mismatch", DIFFERENT, make_narrow("float16")), "bfloat16")
    assert told.verdict == "mismatch"


def test_a_wider_run_that_computes_in_the_dtype_of_the_case_names_no_cause() -> None:
    answer = judge("mismatch", make_narrow("bfloat16"))
    told = merge(judge("mismatch", DIFFERENT), [("float32", answer)], "bfloat16")
    assert told.findings == (DIFFERENT,)
    assert "float32 decides nothing" in told.notes[-1]
    assert merge(judge("mismatch", DIFFERENT), [("float32", answer)], "float16").findings != (DIFFERENT,)


def test_a_finding_that_an_undecided_wider_run_lacks_is_a_matter_of_precision() -> None:
    told = merge(judge("mismatch", DIFFERENT), [("float32", UNDECIDED)])
    assert told.findings[0].wider[0].outcome == "not-shown"


@pytest.mark.parametrize(("num_held", "expected"), [(0, None), (3, "float32")])
def test_a_pass_with_choices_of_one_device_is_confirmed_in_float32(
    num_held: int, expected: str | None
) -> None:
    case = in_precision("bfloat16", "own:shard")
    facts = ReplayedModules(num_replayed=1, left_out={}, num_near_ties=5, num_held=num_held)
    modules = CheckResult(name=CheckName.MODULES, verdict="pass", tensors=1, facts=facts)
    passing = judge("pass").model_copy(update={"checks": (modules,)})
    wide = choose_confirming(case, passing, find_confirming([case], []))
    assert (None if wide is None else wide.recipe.precision) == expected
    failing = passing.model_copy(update={"verdict": "mismatch"})
    assert choose_confirming(case, failing, {}) is None
