"""`moeverify run --follow-up`: runs the layouts that end an ambiguity, and merges what they say. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from moeverify.axes.groups import list_degrees
from moeverify.case.schema import Case
from moeverify.controller.options import RunOptions
from moeverify.controller.run import run_cases
from moeverify.controller.separation import change_layout
from moeverify.diagnose.verdict import is_close, measure_axis, name_either
from moeverify.launch.world import external_world
from moeverify.results.cause import Cause
from moeverify.results.finding import Finding, FollowUp
from moeverify.results.run import CaseResult, Event, RunResult


@dataclass(frozen=True)
class _Question:
    """An ambiguous finding, its case, and the case under the layout that should answer."""

    case: Case
    finding: Finding
    asked: Case


def follow_up(
    cases: Sequence[Case], result: RunResult, options: RunOptions, on_event: Callable[[Event], None]
) -> RunResult:
    """Return the run with what further layouts say of its ambiguous findings; one launch serves all of them.

    They run under the same fault. Ranks that somebody else has started run nothing more.
    """
    questions = list(_list_questions(cases, result))
    if not questions or external_world() is not None:
        return result
    faults = {
        question.asked.name: fault
        for question in questions
        if (fault := options.case_faults.get(question.case.name, options.fault)) is not None
    }
    folder = options.folder / "follow-up" if options.folder is not None else None
    chosen = replace(options, folder=folder, fault=None, case_faults=faults)
    answers = run_cases([question.asked for question in questions], chosen, on_event)
    assert answers is not None  # there is no other launcher
    merged = {
        (question.case.name, id(question.finding)): merge(
            question.case, question.finding, question.asked, answer
        )
        for question, answer in zip(questions, answers.cases, strict=True)
    }
    told = tuple(
        case.model_copy(update={"findings": tuple(merged.get((case.name, id(f)), f) for f in case.findings)})
        for case in result.cases
    )
    more = {"launches": result.launches + answers.launches, "seconds": result.seconds + answers.seconds}
    return result.model_copy(update={"cases": told, **more})


def _list_questions(cases: Sequence[Case], result: RunResult) -> list[_Question]:
    by_name = {case.name: case for case in cases}
    questions: list[_Question] = []
    for told in result.cases:
        for finding in told.findings:
            if finding.follow_up is None or finding.follows:
                continue
            case = by_name[told.name]
            asked = change_layout(case, finding.follow_up.layout)
            name = f"{case.name}-follow-up-{len(questions) + 1}"
            questions.append(_Question(case, finding, asked.model_copy(update={"name": name})))
    return questions


def merge(case: Case, finding: Finding, asked: Case, answer: CaseResult) -> Finding:
    """Return an ambiguous finding with what another layout says of it."""
    question = finding.follow_up
    assert question is not None
    where = "{" + ", ".join(f"{name}: {value}" for name, value in question.layout.items()) + "}"
    same = next((f for f in answer.findings if not f.follows and f.code == finding.code), None)
    left: tuple[str, ...] = ()
    if answer.verdict in ("error", "skipped"):
        told = f"the layout {where} did not run: {answer.reason}"
    elif same is None:
        other = next((f.cause for f in answer.findings if f.cause), "nothing differs there")
        told = f"the layout {where} does not show it: {other}"
    else:
        left = _find_left(case, finding, asked, same)
        names = f"axis {' or '.join(left)}" if left else "none of these axes"
        told = f"{names}: followed up under {where}, where {same.cause}"
    return _settle(finding, question.model_copy(update={"answer": told}), left)


def _find_left(case: Case, finding: Finding, asked: Case, same: Finding) -> tuple[str, ...]:
    """Return the axes that explain both findings."""
    question = finding.follow_up
    assert question is not None
    if finding.code != Cause.SCALE or finding.scale is None or same.scale is None:
        also = same.place.axes if same.place is not None else ()
        return tuple(axis for axis in question.axes if axis in also)
    left = []
    for axis in question.axes:
        before, after = (measure_axis(axis, list_degrees(each)) for each in (case, asked))
        is_inverse = not is_close(finding.scale, before)
        if is_close(same.scale, 1.0 / after if is_inverse else after):
            left.append(axis)
    return tuple(left)


def _settle(finding: Finding, question: FollowUp, left: tuple[str, ...]) -> Finding:
    """Return the finding with its answer; where fewer axes are left, its cause and its place name only these."""
    changes: dict[str, object] = {"follow_up": question}
    if left and len(left) < len(question.axes) and finding.place is not None:
        changes["cause"] = finding.cause.replace(name_either(question.axes), name_either(left))
        changes["where"] = finding.where.replace(", ".join(question.axes), ", ".join(left))
        changes["place"] = finding.place.model_copy(update={"axes": left})
    return finding.model_copy(update=changes)
