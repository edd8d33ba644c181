"""Adds words to the findings of a run, for readers of its JSON and for callers from Python."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.report.numbers import format_seconds
from moeverify.report.words.cause import (
    describe_cause,
    describe_evidence,
    describe_failures,
    describe_where,
)
from moeverify.report.words.follow_up import describe_follow_up
from moeverify.report.words.issued import describe_issued
from moeverify.results.finding import Finding
from moeverify.results.run import CaseResult, GoldenTime, RunResult

_NUM_GOLDENS = 4


def word_run(run: RunResult) -> RunResult:
    """Return a run whose findings also contain their words."""
    return run.model_copy(update={"cases": tuple(word_case(case) for case in run.cases)})


def word_case(case: CaseResult) -> CaseResult:
    """Return a case whose findings contain their words, with its notes."""
    changes = {"findings": tuple(map(word_finding, case.findings)), "notes": list_notes(case)}
    return case.model_copy(update=changes)


def list_notes(case: CaseResult) -> tuple[str, ...]:
    """Return the notes of a case, including one for each failed diagnosis."""
    return tuple(dict.fromkeys((*case.notes, *describe_failures(case.findings))))


def describe_goldens(goldens: Sequence[GoldenTime]) -> str:
    """Return the goldens that were recorded for a run and their times, longest first.

    The result is empty if all goldens existed already.
    """
    if not goldens:
        return ""
    longest = sorted(goldens, key=lambda golden: -golden.seconds)
    named = [f"{golden.recipe} {format_seconds(golden.seconds)}" for golden in longest[:_NUM_GOLDENS]]
    others = longest[_NUM_GOLDENS:]
    if others:
        whole = format_seconds(sum(golden.seconds for golden in others))
        named.append(f"{len(others)} more {whole}")
    return f"made for this run, with noise: {', '.join(named)}"


def word_finding(finding: Finding) -> Finding:
    """Return a finding with all of its words."""
    changes: dict[str, object] = {
        "cause": describe_cause(finding),
        "where": describe_where(finding),
        "evidence": describe_evidence(finding),
    }
    if finding.place is not None:
        changes["place"] = finding.place.model_copy(
            update={"collectives": describe_issued(finding.place, finding.facts)}
        )
    if finding.follow_up is not None and finding.follow_up.outcome:
        answer = describe_follow_up(finding.follow_up)
        changes["follow_up"] = finding.follow_up.model_copy(update={"answer": answer})
    return finding.model_copy(update=changes)
