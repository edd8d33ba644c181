"""Adds words to the findings of a run, for readers of its JSON and for callers from Python.

Other pages use its words for collectives inside a module, and for layouts that resolve an ambiguity.
"""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.report.numbers import format_seconds
from moeverify.report.words.cause import (
    describe_cause,
    describe_evidence,
    describe_explanation,
    describe_failures,
    describe_where,
)
from moeverify.report.words.check import list_issues
from moeverify.report.words.factor import name_product
from moeverify.report.words.subject import MODEL
from moeverify.results.collective import IssuedCollective
from moeverify.results.facts import CollectiveFacts, Facts
from moeverify.results.finding import Finding, FollowUp
from moeverify.results.place import Place
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


def describe_issued(place: Place, facts: Facts | None = None) -> tuple[str, ...]:
    """Return one line per kind of collective issued in the place's module, or the nearest enclosing one.

    If ranks disagree on a collective, `facts` determine the lines: one per group of ranks.
    """
    if isinstance(facts, CollectiveFacts):
        return list_issues(facts)
    if place.issued is None:
        return place.collectives  # from a file of an older version
    if not place.issued:
        return ("none in this module, nor in one around it",)
    where = "" if place.issued_in == place.module else f"in {place.issued_in or MODEL}, "
    return tuple(where + describe_collective(collective) for collective in place.issued)


def describe_collective(collective: IssuedCollective) -> str:
    """Return direction, operation, group, dtype and shape, count, and call site."""
    group = ",".join(map(str, collective.group))
    shape = list(collective.shapes[0]) if len(collective.shapes) == 1 else " of several shapes"
    what = f" on {collective.dtype}{shape}" if collective.shapes else ""
    times = f", {collective.times} times" if collective.times > 1 else ""
    site = f", called at {collective.site}" if collective.site else ""
    return f"{collective.direction}: {collective.op} over {collective.axis} ({group}){what}{times}{site}"


def describe_follow_up(question: FollowUp) -> str:
    """Return the layout that would resolve an ambiguity, or the result under it."""
    layout = "{" + ", ".join(f"{name}: {value}" for name, value in question.layout.items()) + "}"
    names = [name_product(product) for product in question.candidates] or list(question.axes)
    seen = describe_explanation(question.seen) if question.seen is not None else "nothing differs"
    if question.outcome == "narrowed":
        left = " or ".join(name_product(product) for product in question.left)
        return f"{left}: under {layout}, {seen}"
    if question.outcome == "none-left":
        return f"none of {', '.join(names)}: under {layout}, {seen}"
    if question.outcome == "not-shown":
        return f"not decided: under {layout}, {question.reason or seen}"
    if question.outcome == "not-run":
        return f"not decided: the layout {layout} did not run: {question.reason}"
    return question.answer or f"layout {layout} separates {' and '.join(names)}"


def name_candidates(question: FollowUp) -> str:
    """Return the first two candidates that a layout separates: `ep and dp_replicate`."""
    names = [name_product(product) for product in question.candidates] or list(question.axes)
    return " and ".join(names[:2])
