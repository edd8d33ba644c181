"""`moeverify run --follow-up`: runs further layouts to resolve ambiguous findings. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from moeverify.cases.axes.groups import list_degrees
from moeverify.cases.schema import Case
from moeverify.results.explanation import Explanation
from moeverify.results.factor import Product, is_same
from moeverify.results.finding import Finding, FollowUp
from moeverify.results.operation import Scaled, Unreduced
from moeverify.results.run import CaseResult, Event, RunResult
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.run import run_cases
from moeverify.verification.controller.separation import change_layout
from moeverify.verification.launch.world import external_world


@dataclass(frozen=True)
class _Question:
    """An ambiguous finding, its case, and the case with the layout that should resolve it."""

    case: Case
    finding: Finding
    asked: Case


def follow_up(
    cases: Sequence[Case], result: RunResult, options: RunOptions, on_event: Callable[[Event], None]
) -> RunResult:
    """Return the run with its ambiguous findings resolved by further layouts, where possible.

    A single launch runs all further cases, under the same faults. Does nothing under an external launcher,
    whose ranks cannot run more cases.
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
    # The answers are the factors of formulas. The search for the first wrong operation adds nothing to them.
    chosen = replace(options, folder=folder, fault=None, case_faults=faults, explain_seconds=0.0)
    answers = run_cases([question.asked for question in questions], chosen, on_event)
    assert answers is not None  # not an external launch
    merged = {
        (question.case.name, id(question.finding)): merge(
            question.case, question.finding, question.asked, answer
        )
        for question, answer in zip(questions, answers.cases, strict=True)
    }
    cases_answered = tuple(
        case.model_copy(update={"findings": tuple(merged.get((case.name, id(f)), f) for f in case.findings)})
        for case in result.cases
    )
    return result.answered(cases_answered, answers)


def _list_questions(cases: Sequence[Case], result: RunResult) -> list[_Question]:
    by_name = {case.name: case for case in cases}
    questions: list[_Question] = []
    for answered in result.cases:
        for finding in answered.findings:
            if finding.follow_up is None or finding.follows:
                continue
            case = by_name[answered.name]
            asked = change_layout(case, finding.follow_up.layout)
            name = f"{case.name}-follow-up-{len(questions) + 1}"
            questions.append(_Question(case, finding, asked.model_copy(update={"name": name})))
    return questions


def merge(case: Case, finding: Finding, asked: Case, answer: CaseResult) -> Finding:
    """Return an ambiguous finding with the outcome of the run under another layout."""
    question = finding.follow_up
    assert question is not None
    if answer.verdict in ("error", "skipped"):
        answered = question.model_copy(update={"outcome": "not-run", "reason": answer.reason})
        return finding.model_copy(update={"follow_up": answered})
    explained = [each for each in answer.findings if not each.follows and each.explanation is not None]
    same = next((each for each in explained if each.code == finding.code), None)
    if same is None:
        other = explained[0].explanation if explained else None
        answered = question.model_copy(update={"outcome": "not-shown", "seen": other})
        return finding.model_copy(update={"follow_up": answered})
    assert finding.explanation is not None
    assert same.explanation is not None
    left = find_left(finding.explanation, same.explanation, list_degrees(asked))
    answered = question.model_copy(
        update={
            "outcome": "narrowed" if left else "none-left",
            "left": left,
            "seen": same.explanation.keep(left),
        }
    )
    return _narrow(finding, answered, left)


def find_left(before: Explanation, after: Explanation, degrees: Mapping[str, int]) -> tuple[Product, ...]:
    """Return the candidates of `before` that also explain the finding `after` of another layout.

    `degrees` belong to the other layout. A missing reduction must be missing over the same axis there. A
    factor must have the value that the candidate product has there.
    """
    if isinstance(before.operation, Unreduced):
        return tuple(product for product in before.candidates if product in after.candidates)
    if not isinstance(before.operation, Scaled) or not isinstance(after.operation, Scaled):
        return ()
    others = {each.part: each.factor for each in after.operation.contributions}
    left = []
    for product in before.candidates:
        wanted = product.measure(degrees)
        factors = [
            others.get(each.part) for each in before.operation.contributions if product in each.factor.equals
        ]
        if all(factor is not None and is_same(factor.value**factor.power, wanted) for factor in factors):
            left.append(product)
    return tuple(left)


def _narrow(finding: Finding, question: FollowUp, left: tuple[Product, ...]) -> Finding:
    """Return the finding with its outcome and the remaining candidates. Its place keeps only their axes."""
    assert finding.explanation is not None
    changes: dict[str, object] = {"follow_up": question, "explanation": finding.explanation.keep(left)}
    if finding.place is not None:
        axes = tuple(dict.fromkeys(source for product in left for source in product.sources))
        changes["place"] = finding.place.model_copy(update={"axes": axes})
    return finding.model_copy(update=changes)
