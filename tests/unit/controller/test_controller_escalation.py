"""What wider precisions say of findings without a cause, and which cases are asked at all."""

from __future__ import annotations

from typing import Any

import pytest

from moeverify.controller.escalation import list_wider, merge, needs_escalation
from moeverify.report.words.wider import describe_wider
from moeverify.results.cause import Cause
from moeverify.results.finding import Finding
from moeverify.results.run import CaseResult
from moeverify.validation.load import build_case


def find(tensor: str, **fields: Any) -> Finding:
    return Finding(
        check="gradient", kind="gradient", tensor=tensor, step=0, rank=0, error=1.0, bound=0.1, **fields
    )


def answer(*findings: Finding, verdict: Any = "mismatch", reason: str = "") -> CaseResult:
    return CaseResult(
        name="c", file="c.yaml", verdict=verdict, reason=reason, ranks=2, seconds=1.0, findings=findings
    )


NAMED = find("w", code=Cause.SCALE)
UNKNOWN = find("w", unexplained=("w",))


def test_only_cases_without_any_cause_are_asked() -> None:
    assert needs_escalation(answer(UNKNOWN))
    assert needs_escalation(answer(UNKNOWN, find("v", code=Cause.SCALE, follows="w")))
    assert not needs_escalation(answer(UNKNOWN, NAMED))
    assert not needs_escalation(answer(verdict="pass"))


@pytest.mark.parametrize(
    ("precision", "wider"),
    [
        ("bfloat16", ["float32", "float64"]),
        ("mixed", ["float32", "float64"]),
        ("float32", ["float64"]),
        ("float64", []),
    ],
)
def test_each_precision_has_its_wider_ones(precision: str, wider: list[str]) -> None:
    recipe = {"model": {"preset": "tiny-gpt"}, "precision": precision}
    case = build_case({"name": "c", "recipe": recipe, "layout": {"dp_shard": 2}})
    asked = list_wider(case)
    assert [each.recipe.precision for each in asked] == wider
    assert [each.name for each in asked] == [f"c-{each}" for each in wider]


def test_what_persists_is_named_there() -> None:
    merged = merge(answer(UNKNOWN), [("float32", answer(UNKNOWN)), ("float64", answer(NAMED))])
    cause, before = merged.findings
    assert (cause.code, cause.wider[0].precision, cause.follows) == (Cause.SCALE, "float64", "")
    assert before.follows == "w"
    assert [each.outcome for each in before.wider] == ["unexplained", "named"]
    assert describe_wider(cause) == ("found in float64, where rounding does not hide it",)


def test_what_vanishes_is_a_matter_of_precision() -> None:
    merged = merge(
        answer(UNKNOWN), [("float32", answer(verdict="pass")), ("float64", answer(verdict="pass"))]
    )
    (finding,) = merged.findings
    assert finding.follows == ""
    assert describe_wider(finding) == ("in float32 and float64 nothing differs: it is a matter of precision",)


def test_what_cannot_run_is_told() -> None:
    refused = answer(verdict="skipped", reason="megablocks has no float64")
    (finding,) = merge(answer(UNKNOWN), [("float64", refused)]).findings
    assert describe_wider(finding) == ("float64 did not run: megablocks has no float64",)
