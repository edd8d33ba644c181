"""Escalation: runs a case in wider precisions where rounding may hide a finding or its cause.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace

from moeverify.cases.schema import Case, Precision
from moeverify.cases.validation.rules import validate
from moeverify.report.words.wider import (
    describe_confirmation,
    describe_decision,
    describe_left_out,
    describe_narrow_layout,
    describe_own_dtypes,
    describe_unasked,
    describe_unconfirmed,
)
from moeverify.results.checks import Kind
from moeverify.results.facts import DtypeFacts, OwnStep, ReplayedModules
from moeverify.results.finding import Finding, Wider
from moeverify.results.run import CaseResult, Event, RunResult
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.rating import SURE, UPSTREAM, rate_cause
from moeverify.verification.controller.run import find_overall_verdict, run_cases
from moeverify.verification.launch.world import external_world

WIDER: Mapping[Precision, tuple[Precision, ...]] = {
    "bfloat16": ("float32", "float64"),
    "mixed": ("float32", "float64"),
    "float32": ("float64",),
    "float64": (),
}


# Verdicts that a run in a wider precision may change.
_CONFIRMED = ("pass", "undecided")

# Kinds of tensors that the optimizer step computes from the gradients.
_OF_STEP = frozenset({Kind.UPDATE, Kind.WEIGHT, Kind.OPTIMIZER_STATE})


def change_precision(case: Case, precision: Precision) -> Case:
    """Return the case with its recipe in another precision. The recipe is renamed.

    Outside `mixed`, no module is an exception to the precision, so `layout.in_float32` is dropped.
    """
    changed = {"precision": precision, "name": f"{case.recipe.name}-{precision}"}
    kept = case.layout.in_float32 if precision == "mixed" else ()
    layout = case.layout.model_copy(update={"in_float32": kept})
    return case.model_copy(update={"recipe": case.recipe.model_copy(update=changed), "layout": layout})


def try_precision(case: Case, precision: Precision) -> Case | None:
    """Return `change_precision` of the case, or None if its layout does not support the precision."""
    changed = change_precision(case, precision)
    return None if validate(changed) else changed


def escalate(
    cases: Sequence[Case],
    result: RunResult,
    options: RunOptions,
    on_event: Callable[[Event], None],
    *,
    confirming: Mapping[str, Case] | None = None,
    on_confirmed: Callable[[Event], None] | None = None,
) -> RunResult:
    """Return the run with the results of wider precisions for findings without a named cause.

    A single launch runs all wider cases, under the same faults. A passing case is also run if `confirming`
    holds a wider case for it, and so is an undecided case; see `choose_confirming`. `on_confirmed` receives
    the end event of each such case with the merged result, and `on_event` all other events. Under an
    external launcher no further case can run: a note lists the omitted precisions.
    """
    by_name = {case.name: case for case in cases}
    asked: dict[str, list[Case]] = {}
    for answered in result.cases:
        case = by_name.get(answered.name)
        if case is not None and needs_escalation(answered):
            asked[case.name] = list(list_wider(case))
        elif case is not None and (wide := choose_confirming(case, answered, confirming or {})) is not None:
            asked[case.name] = [wide]
    wanted = [wide for wides in asked.values() for wide in wides]
    if not wanted:
        return result
    if external_world() is not None:
        left_out = (_note_left_out(each, asked.get(each.name, ())) for each in result.cases)
        return result.model_copy(update={"cases": tuple(left_out)})
    chosen = _widen(options, asked)
    own = {name: _compute_dtype_of(by_name[name]) for name in asked}
    passing = {
        asked[each.name][0].name: each
        for each in result.cases
        if each.verdict in _CONFIRMED and each.name in asked
    }
    early = _confirm_early(passing, wanted, own, on_event, on_confirmed or on_event)
    answers = run_cases(wanted, chosen, early)
    assert answers is not None  # not an external launch
    answers = _escalate_confirmed(passing, wanted, own, answers, chosen, on_event)
    found = {answer.name: answer for answer in answers.cases}
    merged = []
    for each in result.cases:
        wider = [(wide.recipe.precision, found[wide.name]) for wide in asked.get(each.name, [])]
        is_confirmed = wider and each.verdict in _CONFIRMED
        dtype = own.get(each.name, "")
        merged.append(confirm(each, *wider[0], dtype) if is_confirmed else merge(each, wider, dtype))
    return result.answered(tuple(merged), answers).model_copy(
        update={"verdict": find_overall_verdict(merged)}
    )


def _widen(options: RunOptions, asked: Mapping[str, Sequence[Case]]) -> RunOptions:
    """Return the options of the wider cases; each has the faults of its original case."""
    faults = {
        wide.name: fault
        for name, wides in asked.items()
        for wide in wides
        if (fault := options.case_faults.get(name, options.fault)) is not None
    }
    return replace(
        options,
        folder=options.folder / "wider" if options.folder is not None else None,
        fault=None,
        case_faults=faults,
        require_goldens=False,  # no golden is recorded for these recipes
        widened=True,
    )


def escalate_stream(
    results: Generator[CaseResult],
    cases: Sequence[Case],
    options: RunOptions,
    on_event: Callable[[Event], None],
) -> Generator[CaseResult]:
    """Yield results as they arrive, and at the end those that need wider precisions.

    A single launch runs the wider cases, as in `escalate`. Closing the iterator closes `results`.
    """
    confirming = find_confirming(cases, cases)
    by_name = {case.name: case for case in cases}
    open_ones = []
    with closing(results):
        for result in results:
            if _is_open(by_name[result.name], result, confirming):
                open_ones.append(result)
            else:
                yield result
    if open_ones:
        verdict = find_overall_verdict(open_ones)
        run = RunResult(verdict=verdict, environment={}, cases=tuple(open_ones))
        yield from escalate(cases, run, options, on_event, confirming=confirming).cases


def _is_open(case: Case, result: CaseResult, confirming: Mapping[str, Case]) -> bool:
    """Return whether a result needs a run in wider precisions."""
    if result.verdict in _CONFIRMED:
        return choose_confirming(case, result, confirming) is not None
    return needs_escalation(result) and bool(list_wider(case))


def _note_left_out(result: CaseResult, wides: Sequence[Case]) -> CaseResult:
    """Return a result with a note on the precisions that were not run, if any."""
    if not wides:
        return result
    note = describe_left_out([wide.recipe.precision for wide in wides])
    return result.model_copy(update={"notes": (*result.notes, note)})


def needs_escalation(case: CaseResult) -> bool:
    """Return whether the leading finding of a mismatch leaves its cause uncertain.

    For example, a gradient that is twice too large may be due to a reduction factor or to a module that
    computes something twice. A result kept from an earlier run may already have been escalated; it is not
    escalated again.
    """
    lead = case.lead
    return case.verdict == "mismatch" and lead is not None and not lead.wider and rate_cause(lead) < SURE


def list_wider(case: Case) -> Sequence[Case]:
    """Return the case in each wider precision that its layout supports, each with a distinct name."""
    wider = []
    for precision in WIDER[case.recipe.precision]:
        changed = try_precision(case, precision)
        if changed is not None:
            wider.append(changed.model_copy(update={"name": f"{case.name}-{precision}"}))
    return wider


def find_confirming(cases: Sequence[Case], others: Sequence[Case]) -> dict[str, Case]:
    """Map case names to a case in the widest supported precision, which confirms a pass of the former.

    float64 resolves a billionth of the rounding error of bfloat16, and so reveals errors below that
    rounding error: one row of a thousand, or a few elements of a bias. This requires a model that computes
    in the precision of the recipe throughout. User code may legitimately use a fixed dtype. A case with a
    user's step function is confirmed all the same, because only the golden can check that step; see
    `confirm`. Cases equal to one of `others` are left out.
    """
    known = [_strip(each) for each in others]
    found = {}
    for case in cases:
        recipe, layout = case.recipe, case.layout
        is_own = recipe.model.reference is None or layout.parallelize is not None
        if recipe.float8 != "none" or (is_own and recipe.step is None):
            continue
        wider = list_wider(case)
        if wider and _strip(wider[-1]) not in known:
            found[case.name] = wider[-1]
    return found


def asks_confirmation(result: CaseResult, confirming: Mapping[str, Case]) -> bool:
    """Return whether a result is a pass to be confirmed in a wider precision."""
    wide = confirming.get(result.name)
    if result.verdict not in _CONFIRMED or wide is None:
        return False
    return wide.recipe.step is None or has_own_results(result)


def choose_confirming(case: Case, result: CaseResult, confirming: Mapping[str, Case]) -> Case | None:
    """Return the wider case that confirms a pass or decides an undecided case; None if there is none.

    An undecided case outside `confirming`, or of a user's step, runs in the next wider precision, where
    bounds are 1e-5 and a cast to float32 changes nothing. With float8 it runs in the widest one, because below
    float64 the rounding to float8 widens all bounds. A pass in which ranks took one device's choices near a
    tie runs there too, where the choices are their own.
    """
    decides = result.verdict == "undecided" and case.recipe.step is not None
    if asks_confirmation(result, confirming) and not decides:
        return confirming[result.name]
    is_open = result.verdict == "undecided" or (result.verdict == "pass" and _has_held_choices(result))
    wider = list_wider(case) if is_open else ()
    if not wider:
        return None
    return wider[0] if case.recipe.float8 == "none" else wider[-1]


def _has_held_choices(result: CaseResult) -> bool:
    """Return whether ranks took choices near a tie, such as experts, from one device."""
    facts = [check.facts for check in result.checks]
    return any(isinstance(each, ReplayedModules) and each.num_held > 0 for each in facts)


def _compute_dtype_of(case: Case) -> str:
    return "bfloat16" if case.recipe.precision == "mixed" else case.recipe.precision


def _keeps_dtype(answer: CaseResult, dtype: str) -> bool:
    """Return whether a wider run computed in the dtype of the case; user code may fix the dtype."""
    facts = [finding.facts for finding in answer.findings]
    return any(isinstance(each, DtypeFacts) and each.dtype == dtype for each in facts)


def has_own_results(result: CaseResult) -> bool:
    """Return whether a user's step function computes results that no check can recompute."""
    return any(isinstance(check.facts, OwnStep) for check in result.checks)


def _strip(case: Case) -> Case:
    """Return a case without the fields that do not affect its verdict."""
    recipe = case.recipe.model_copy(update={"name": ""})
    return case.model_copy(update={"name": "", "description": "", "file": "", "recipe": recipe})


def note_unasked(
    cases: Sequence[Case], confirming: Mapping[str, Case], on_event: Callable[[Event], None]
) -> Callable[[Event], None]:
    """Return an event handler that adds a note to each result that still needs wider precisions.

    The results of a run that ends early are then correct as stored. `escalate` removes the note again.
    """
    by_name = {case.name: case for case in cases}

    def handle(event: Event) -> None:
        result = event.result
        note = None
        case = by_name.get(result.name) if result is not None else None
        if result is not None and case is not None:
            if (wide := choose_confirming(case, result, confirming)) is not None:
                note = describe_unconfirmed(wide.recipe.precision)
            elif needs_escalation(result):
                wider = [wide.recipe.precision for wide in list_wider(case)]
                note = describe_unasked(wider) if wider else None
        if result is not None and note is not None:
            noted = result.model_copy(update={"notes": (*result.notes, note)})
            event = event.model_copy(update={"result": noted})
        on_event(event)

    return handle


def count_unasked(cases: Sequence[Case], results: Mapping[str, CaseResult]) -> int:
    """Return how many of these results still need wider precisions. `results` is keyed by case name."""
    confirming = find_confirming(cases, [])
    known = [(case, results[case.name]) for case in cases if case.name in results]
    return sum(_is_open(case, result, confirming) for case, result in known)


def _confirm_early(
    passing: Mapping[str, CaseResult],
    wides: Sequence[Case],
    own: Mapping[str, str],
    on_event: Callable[[Event], None],
    on_confirmed: Callable[[Event], None],
) -> Callable[[Event], None]:
    """Return a handler for the events of wider runs. `passing` is keyed by the names of the wider cases.

    `own` has the dtype in which each case computes, by its name.
    """
    precisions = {wide.name: wide.recipe.precision for wide in wides}

    def handle(event: Event) -> None:
        answer = event.result
        if answer is None or answer.name not in passing:
            on_event(event)
            return
        case = passing[answer.name]
        confirmed = confirm(case, precisions[answer.name], answer, own[case.name])
        on_confirmed(event.model_copy(update={"result": confirmed}))

    return handle


def _escalate_confirmed(
    passing: Mapping[str, CaseResult],
    wides: Sequence[Case],
    own: Mapping[str, str],
    answers: RunResult,
    options: RunOptions,
    on_event: Callable[[Event], None],
) -> RunResult:
    """Return the answers with the causes of mismatches of confirming runs, searched in still wider precisions.

    Operations are recorded in float64 alone, and a cause that float32 suggests must hold there too.
    """
    precisions = {wide.name: wide.recipe.precision for wide in wides}
    mismatches = [
        answer
        for answer in answers.cases
        if (case := passing.get(answer.name)) is not None
        and confirm(case, precisions[answer.name], answer, own[case.name]).findings
    ]
    if not mismatches:
        return answers
    known = {each.name for each in mismatches}
    run = answers.model_copy(update={"cases": tuple(mismatches)})
    deeper = escalate([wide for wide in wides if wide.name in known], run, options, on_event)
    named = {each.name: each for each in deeper.cases}
    return deeper.model_copy(update={"cases": tuple(named.get(each.name, each) for each in answers.cases)})


def confirm(case: CaseResult, precision: Precision, answer: CaseResult, own: str = "") -> CaseResult:
    """Return a passing or undecided case with the outcome of its run in a wider precision.

    If nothing differs there, the case gets a note; if that run is decided, an undecided case passes.
    Otherwise the wider run gives the whole result, since the passing checks of the case do not cover these
    findings. User code may legitimately round. A pass of a user's step is in doubt only if the gradients
    agree in the wider run, and the results of the step differ. A wider run that computes in `own`, the dtype
    of the case, is ignored.
    """
    is_mismatch = answer.verdict == "mismatch"
    if is_mismatch and case.verdict == "pass" and has_own_results(case) and not _is_of_step_alone(answer):
        return case.model_copy(update={"notes": (*case.notes, describe_own_dtypes(precision))})
    if is_mismatch and _keeps_dtype(answer, own):
        return case.model_copy(update={"notes": (*case.notes, describe_narrow_layout(precision))})
    if answer.verdict == "pass" and case.verdict == "undecided":
        notes = (*case.notes, describe_decision(precision, case))
        changed = {"verdict": "pass", "reason": "", "decided_in": precision, "notes": notes}
        return case.model_copy(update=changed)
    note = describe_confirmation(precision, answer)
    if not is_mismatch:
        return case.model_copy(update={"notes": (*case.notes, note)})
    findings = tuple(
        finding
        if finding.follows
        else finding.model_copy(update={"wider": (_find_wider(finding, precision),)})
        for finding in answer.findings
    )
    return answer.model_copy(update={"name": case.name, "findings": findings, "notes": (note,)})


def _find_wider(finding: Finding, precision: Precision) -> Wider:
    """Return that a confirming run found a finding, or the still wider run that named its cause."""
    return Wider(
        precision=finding.wider[0].precision if finding.is_of_wider_run else precision, outcome="found"
    )


def _is_of_step_alone(answer: CaseResult) -> bool:
    """Return whether, in the first step with a difference, only results of the optimizer step differ."""
    first = min(finding.step for finding in answer.findings)
    return all(finding.kind in _OF_STEP for finding in answer.findings if finding.step == first)


def merge(case: CaseResult, answers: Sequence[tuple[Precision, CaseResult]], own: str = "") -> CaseResult:
    """Return a case merged with its results in wider precisions, given from narrow to wide.

    The leading finding of a wider precision leads if it has a higher rating than the leading finding of the
    case. The less certain findings of the case then follow from it. Among equal ratings the widest precision
    wins. The operators are from the widest precision that has any. A wider run that computes in `own`, the
    dtype of the case, only adds a note.
    """
    narrow = [precision for precision, answer in answers if _keeps_dtype(answer, own)]
    answers = [each for each in answers if each[0] not in narrow]
    notes = (*case.notes, *map(describe_narrow_layout, narrow))
    case = case.model_copy(update={"notes": notes})
    if not answers:
        return case
    known = rate_cause(case.lead)
    seen = tuple(_sum_up(precision, answer, known) for precision, answer in answers)
    named = [
        (rate_cause(answer.lead), number)
        for number, (_, answer) in enumerate(answers)
        if seen[number].outcome == "named"
    ]
    leads: list[Finding] = []
    if named:
        number = max(named)[1]
        leads = [
            finding.model_copy(update={"wider": (seen[number],)})
            for finding in answers[number][1].findings
            if not finding.follows and (finding.is_explained or known == UPSTREAM)
        ]
    leading = {_identify(lead) for lead in leads}
    findings = list(leads)
    for finding in case.findings:
        changed: dict[str, object] = {}
        if not finding.follows and (rate_cause(finding) < SURE or _identify(finding) in leading):
            changed = {"wider": seen} | ({"follows": leads[0].tensor} if leads else {})
        findings.append(finding.model_copy(update=changed))
    operators = [answer.operators for _, answer in answers if answer.operators]
    return case.model_copy(
        update={"findings": tuple(findings), "operators": (operators or [case.operators])[-1]}
    )


def _identify(finding: Finding) -> tuple[str, str, str]:
    return finding.check, finding.kind, finding.tensor


def _sum_up(precision: Precision, answer: CaseResult, known: int) -> Wider:
    """Return the outcome in a wider precision, given the rating `known` of the case itself."""
    if answer.verdict in ("error", "skipped"):
        return Wider(precision=precision, outcome="not-run", reason=answer.reason)
    if answer.verdict in ("pass", "undecided"):
        return Wider(precision=precision, outcome="not-shown")
    found = rate_cause(answer.lead)
    if found > known:
        return Wider(precision=precision, outcome="named")
    return Wider(precision=precision, outcome="alike" if found else "unexplained")
