"""Runs the fault benchmark: every fault under its case, in as few launches as possible, and scores the findings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from moeverify.case.schema import Case
from moeverify.compare.result import CaseResult, Event, Finding
from moeverify.compare.score import FaultRow
from moeverify.faults.fault import Fault
from moeverify.suite.options import RunOptions
from moeverify.suite.run import run_cases

LOSS_CURVE = 1e-3


def run_faults(
    faults: Sequence[Fault], options: RunOptions, on_event: Callable[[Event], None]
) -> list[FaultRow]:
    """Return one row a fault, in order. Cases need no recorded golden: each is checked against one device here."""
    cases = [_case_of(fault) for fault in faults]
    targets = {case.name: fault.target for case, fault in zip(cases, faults, strict=True)}
    chosen = replace(options, require_goldens=False, case_faults=targets)
    result = run_cases(cases, chosen, on_event)
    if result is None:
        return []
    return [score(fault, case) for fault, case in zip(faults, result.cases, strict=True)]


def _case_of(fault: Fault) -> Case:
    return fault.case.model_copy(update={"name": fault.number, "description": fault.title})


def score(fault: Fault, result: CaseResult) -> FaultRow:
    """Return how well the findings of one run describe the fault."""
    origins = [finding for finding in result.findings if not finding.follows]
    first = origins[0] if origins else None
    detected = result.verdict == "mismatch"
    return FaultRow(
        number=fault.number,
        title=fault.title,
        source=fault.source,
        is_moe=fault.is_moe,
        detected=detected,
        located=first is not None and fault.expected.locates(place_text(first)),
        cause_named=first is not None and first.code in {cause.value for cause in fault.expected.causes},
        loss_curve=sees_loss_curve(result),
        step=first.step if first else None,
        check=first.check if first else "",
        place=place_text(first) if first else "",
        cause=first.cause if first else "",
        code=first.code if first else "",
        expected=f"{fault.expected.where}: {' or '.join(cause.value for cause in fault.expected.causes)}",
        reason=result.reason or ("" if detected else fault.notes or "nothing differs"),
        seconds=result.seconds,
    )


def place_text(finding: Finding) -> str:
    """Return where a finding says it is: its tensor and its place."""
    return f"{finding.tensor} | {finding.where}" if finding.where else finding.tensor


def sees_loss_curve(result: CaseResult) -> bool:
    """Return whether the losses of some step differ by more than a relative 1e-3."""
    return any(abs(actual - expected) > LOSS_CURVE * abs(expected) for expected, actual in result.losses)
