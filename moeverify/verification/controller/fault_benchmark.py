"""The fault benchmark: runs every fault under its case in few launches and scores the findings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from moeverify.cases.schema import Case, Precision
from moeverify.errors import CaseError, Problem
from moeverify.explain.fitting.order import MECHANISMS
from moeverify.faults.fault import Fault
from moeverify.results.benchmark_rows import FaultRow
from moeverify.results.run import CaseResult, Event
from moeverify.verification.controller import escalation
from moeverify.verification.controller.escalation import change_precision as change_case
from moeverify.verification.controller.escalation import escalate, find_confirming, try_precision
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.reshard import LayoutPair, run_pairs
from moeverify.verification.controller.run import run_cases

LOSS_CURVE = 1e-3


def run_faults(
    faults: Sequence[Fault],
    options: RunOptions,
    on_event: Callable[[Event], None],
    *,
    escalates: bool = False,
    on_wider: Callable[[Event], None] = lambda event: None,
) -> list[FaultRow]:
    """Return one row per fault, in order.

    It needs no golden: it compares each case with a single device.

    With `escalates`, findings without a cause and passing faults are run in wider precisions, as in
    `moeverify run`, and `on_wider` receives the events of these runs. The losses are always from the
    precision of the fault itself. Faults of checkpoints run in separate launches.
    """
    chosen = replace(options, require_goldens=False)
    plain = [fault for fault in faults if fault.saver is None]
    saved = [fault for fault in faults if fault.saver is not None]
    results = _run_saved(saved, chosen, on_event) if saved else []
    cases = [_case_of(fault.case, fault) for fault in plain]
    targets = {case.name: fault.target for case, fault in zip(cases, plain, strict=True)}
    chosen = replace(chosen, case_faults=targets)
    confirming = find_confirming(cases, []) if escalates else {}
    result = run_cases(cases, chosen, on_event) if cases else None
    own = {each.name: each for each in result.cases} if result is not None else {}
    if escalates and result is not None:
        result = escalate(cases, result, chosen, on_wider, confirming=confirming)
    results += result.cases if result is not None else ()
    return score_finished(faults, {each.name: each for each in results}, own)


def score_finished(
    faults: Sequence[Fault], results: Mapping[str, CaseResult], own: Mapping[str, CaseResult] | None = None
) -> list[FaultRow]:
    """Return the rows of the faults whose cases have ended, in order.

    `results` and `own` are keyed by case name. `own` holds the results in the precision of the fault
    itself.
    """
    names = {fault.number: fault.number if fault.saver is None else make_pair(fault).name for fault in faults}
    return [
        score(fault, results[name], (own or {}).get(name))
        for fault in faults
        if (name := names[fault.number]) in results
    ]


def count_unasked(faults: Sequence[Fault], results: Mapping[str, CaseResult]) -> int:
    """Return for how many of these faults the wider precisions have not been run yet."""
    return escalation.count_unasked(
        [_case_of(fault.case, fault) for fault in faults if fault.saver is None], results
    )


def _run_saved(
    faults: Sequence[Fault], options: RunOptions, on_event: Callable[[Event], None]
) -> list[CaseResult]:
    pairs = [make_pair(fault) for fault in faults]
    targets = {pair.name: fault.target for pair, fault in zip(pairs, faults, strict=True)}
    result = run_pairs(pairs, options, on_event, targets)
    return [] if result is None else list(result.cases)


def make_pair(fault: Fault) -> LayoutPair:
    """Return the save and load cases of a checkpoint fault."""
    assert fault.saver is not None
    return LayoutPair(_case_of(fault.saver, fault, " saves"), _case_of(fault.case, fault, " loads"))


def _case_of(case: Case, fault: Fault, role: str = "") -> Case:
    return case.model_copy(update={"name": f"{fault.number}{role}", "description": fault.title})


def change_precision(faults: Sequence[Fault], precision: Precision) -> list[Fault]:
    """Return the faults with their recipes in another precision, without the faults that do not apply there.

    Raises: CaseError when none is left.
    """
    kept = [fault for fault in faults if precision in fault.precisions and _can_run(fault, precision)]
    if not kept:
        others = {each for fault in faults for each in fault.precisions} - {precision}
        numbers = ", ".join(fault.number for fault in faults)
        raise CaseError(
            [
                Problem(
                    f"{numbers}: no bug in a recipe of {precision}",
                    path="--precision",
                    remedy=f"leave it out, or write {' or '.join(sorted(others))}",
                )
            ]
        )
    return [
        replace(
            fault,
            case=change_case(fault.case, precision),
            saver=None if fault.saver is None else change_case(fault.saver, precision),
        )
        for fault in kept
    ]


def choose_left_out(without: Collection[str], only: Collection[str]) -> tuple[str, ...]:
    """Return the hypotheses to leave out, `explain` among them: `without`, or all but `only`.

    Raises: CaseError when a name is unknown or both are given.
    """
    asked = [("--without", name) for name in without] + [("--only", name) for name in only]
    unknown = [(option, name) for option, name in asked if name not in MECHANISMS]
    if unknown:
        raise CaseError(
            [
                Problem(
                    f"no hypothesis `{name}`",
                    path=option,
                    remedy=f"the hypotheses are {', '.join(MECHANISMS)}",
                )
                for option, name in unknown
            ]
        )
    if without and only:
        raise CaseError(
            [Problem("cannot be given beside --only", path="--without", remedy="give one of the two")]
        )
    return tuple(name for name in MECHANISMS if name in without or (only and name not in only))


def _can_run(fault: Fault, precision: Precision) -> bool:
    cases = [fault.case] if fault.saver is None else [fault.saver, fault.case]
    return all(try_precision(case, precision) is not None for case in cases)


def score(fault: Fault, result: CaseResult, own: CaseResult | None = None) -> FaultRow:
    """Return the score of one run's findings. The losses come from `own`, if given."""
    first = result.lead
    curves = result if own is None else own
    found_in = (
        [each.precision for each in first.wider if each.outcome == "found"] if first is not None else []
    )
    detected = result.verdict == "mismatch"
    return FaultRow(
        number=fault.number,
        title=fault.title,
        source=fault.source,
        is_moe=fault.is_moe,
        verdict=result.verdict,
        detected=detected,
        located=first is not None and fault.expected.locates(first),
        cause_named=first is not None and fault.expected.names(first),
        line_shown=first is not None and fault.shows_line(first),
        loss_curve=sees_loss_curve(curves),
        loss_and_norm=sees_loss_and_norm(curves),
        finding=first,
        reason=result.reason or ("" if detected else fault.notes),
        seconds=curves.seconds,
        found_in=found_in[0] if found_in else "",
    )


def sees_loss_curve(result: CaseResult) -> bool:
    """Return whether the losses of any step differ by more than 1e-3, relative."""
    return any(map(_is_seen, result.losses))


def sees_loss_and_norm(result: CaseResult) -> bool:
    """Return whether the losses or gradient norms of any step differ by more than 1e-3, relative."""
    return any(map(_is_seen, (*result.losses, *result.gradient_norms)))


def _is_seen(numbers: tuple[float, float]) -> bool:
    expected, actual = numbers
    # Written with `not`, so that NaN counts as a difference: every comparison with NaN is false.
    return not abs(actual - expected) <= LOSS_CURVE * abs(expected)
