"""Runs a case in wider precisions at once where rounding hides the cause of a finding, and merges what they say.

No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from moeverify.case.schema import Case, Precision
from moeverify.controller.options import RunOptions
from moeverify.controller.run import run_cases
from moeverify.launch.world import external_world
from moeverify.results.finding import Finding, Wider
from moeverify.results.run import CaseResult, Event, RunResult
from moeverify.validation.rules import validate

WIDER: Mapping[Precision, tuple[Precision, ...]] = {
    "bfloat16": ("float32", "float64"),
    "mixed": ("float32", "float64"),
    "float32": ("float64",),
    "float64": (),
}


def change_precision(case: Case, precision: Precision) -> Case:
    """Return the case under the same recipe in another precision, which gives the recipe another name."""
    changed = {"precision": precision, "name": f"{case.recipe.name}-{precision}"}
    return case.model_copy(update={"recipe": case.recipe.model_copy(update=changed)})


def escalate(
    cases: Sequence[Case], result: RunResult, options: RunOptions, on_event: Callable[[Event], None]
) -> RunResult:
    """Return the run with what wider precisions say of findings without a cause; one launch serves all of them.

    They run under the same fault. Ranks that somebody else has started run nothing more.
    """
    by_name = {case.name: case for case in cases}
    asked: dict[str, list[Case]] = {}
    for answered in result.cases:
        case = by_name.get(answered.name)
        if case is not None and needs_escalation(answered):
            asked[case.name] = list(list_wider(case))
    wanted = [wide for wides in asked.values() for wide in wides]
    if not wanted or external_world() is not None:
        return result
    faults = {
        wide.name: fault
        for name, wides in asked.items()
        for wide in wides
        if (fault := options.case_faults.get(name, options.fault)) is not None
    }
    folder = options.folder / "wider" if options.folder is not None else None
    # Nobody records a golden of these recipes.
    chosen = replace(options, folder=folder, fault=None, case_faults=faults, require_goldens=False)
    answers = run_cases(wanted, chosen, on_event)
    assert answers is not None  # there is no other launcher
    found = {answer.name: answer for answer in answers.cases}
    merged = tuple(
        merge(each, [(wide.recipe.precision, found[wide.name]) for wide in asked.get(each.name, [])])
        for each in result.cases
    )
    more = {"launches": result.launches + answers.launches, "seconds": result.seconds + answers.seconds}
    return result.model_copy(update={"cases": merged, **more})


def needs_escalation(case: CaseResult) -> bool:
    """Return whether something differs, and none of what follows from nothing else has a cause."""
    origins = [finding for finding in case.findings if not finding.follows]
    return case.verdict == "mismatch" and bool(origins) and not any(each.is_explained for each in origins)


def list_wider(case: Case) -> Sequence[Case]:
    """Return the case in the wider precisions that its layout can have, each with a name of its own."""
    wider = []
    for precision in WIDER[case.recipe.precision]:
        changed = change_precision(case, precision)
        if not validate(changed):
            wider.append(changed.model_copy(update={"name": f"{case.name}-{precision}"}))
    return wider


def merge(case: CaseResult, answers: Sequence[tuple[Precision, CaseResult]]) -> CaseResult:
    """Return a case with what it showed in wider precisions, the narrowest first.

    What is named in the widest one that names something is the cause, and the findings of the case follow from it.
    """
    if not answers:
        return case
    seen = tuple(_sum_up(precision, answer) for precision, answer in answers)
    origins = [finding for finding in case.findings if not finding.follows]
    named = [
        finding.model_copy(update={"wider": (each,)})
        for each, (_, answer) in zip(seen, answers, strict=True)
        if each.outcome == "named"
        for finding in answer.findings
        if not finding.follows and finding.is_explained
    ]
    widest = [finding for finding in named if finding.wider[0].precision == named[-1].wider[0].precision]
    findings: list[Finding] = list(widest)
    for finding in case.findings:
        changed: dict[str, object] = {}
        if any(finding is origin for origin in origins):
            changed = {"wider": seen} | ({"follows": widest[0].tensor} if widest else {})
        findings.append(finding.model_copy(update=changed))
    return case.model_copy(update={"findings": tuple(findings)})


def _sum_up(precision: Precision, answer: CaseResult) -> Wider:
    if answer.verdict in ("error", "skipped"):
        return Wider(precision=precision, outcome="not-run", reason=answer.reason)
    if answer.verdict == "pass":
        return Wider(precision=precision, outcome="not-shown")
    named = any(finding.is_explained for finding in answer.findings if not finding.follows)
    return Wider(precision=precision, outcome="named" if named else "unexplained")
