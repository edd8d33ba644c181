"""An interrupted command that was checking wider precisions: kept results record the progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from moeverify.cases.schema import Case
from moeverify.report.formats.json import read_run
from moeverify.results.finding import Finding
from moeverify.results.run import CaseResult, Event, RunResult
from moeverify.verification.controller import escalation, fault_benchmark, run

HIDDEN = Finding(check="gradient", kind="gradient", tensor="w", step=0, rank=0, error=1.0, bound=0.1)


def end(case: Case, on_event: Callable[[Event], None], *findings: Finding) -> CaseResult:
    result = CaseResult(
        name=case.name,
        file=case.file,
        verdict="mismatch" if findings else "pass",
        ranks=2,
        seconds=1.0,
        findings=findings,
    )
    on_event(Event(kind="case-end", case=case.name, result=result, num_done=1, num_total=1))
    return result


def run_narrow(cases: Sequence[Case], options: Any, on_event: Any) -> RunResult:
    results = tuple(end(case, on_event) for case in cases)
    return RunResult(verdict="pass", environment={}, started="", seconds=1.0, launches=1, cases=results)


def interrupt(cases: Sequence[Case], options: Any, on_event: Any) -> RunResult:
    raise KeyboardInterrupt


def interrupt_late(cases: Sequence[Case], options: Any, on_event: Any) -> RunResult:
    for case in cases:
        end(case, on_event, HIDDEN)
    raise KeyboardInterrupt


def run_to_end(cases: Sequence[Case], options: Any, on_event: Any) -> RunResult:
    return run_narrow(cases, options, on_event)


@pytest.mark.parametrize(
    ("wide", "verdict", "note"),
    [
        (interrupt, "pass", "its run in float64, which would see more, was cut off"),
        (
            interrupt_late,
            "mismatch",
            "it passes in its own precision: all that is shown is of the run in float64",
        ),
        (run_to_end, "pass", "in float64 it passes, too"),
    ],
)
def test_a_pass_says_what_became_of_its_wider_run(
    invoke: Any,
    monkeypatch: pytest.MonkeyPatch,
    case_file: Path,
    tmp_path: Path,
    wide: Any,
    verdict: str,
    note: str,
) -> None:
    monkeypatch.setattr(run, "run_cases", run_narrow)
    monkeypatch.setattr(escalation, "run_cases", wide)
    file = tmp_path / "r.json"
    told = invoke("run", case_file, "--set", "recipe.precision=bfloat16", "--json", file)
    assert told.exit_code == (0 if wide is run_to_end else 130), told.stderr
    (case,) = read_run(file).cases
    assert (case.name, case.verdict, case.notes) == ("fsdp2-2", verdict, (note,))
    assert note in " ".join(told.stdout.split())


def test_without_wider_runs_a_pass_lacks_none(
    invoke: Any, monkeypatch: pytest.MonkeyPatch, case_file: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "run_cases", run_narrow)
    monkeypatch.setattr(escalation, "run_cases", interrupt)
    file = tmp_path / "r.json"
    words = ["--set", "recipe.precision=bfloat16", "--no-escalate", "--json", file]
    assert invoke("run", case_file, *words).exit_code == 0
    assert read_run(file).cases[0].notes == ()


def run_with_findings(cases: Sequence[Case], options: Any, on_event: Any) -> RunResult:
    results = tuple(end(case, on_event, HIDDEN) for case in cases)
    return RunResult(verdict="mismatch", environment={}, started="", seconds=1.0, launches=1, cases=results)


@pytest.mark.parametrize(
    ("precision", "notes"),
    [
        (
            "bfloat16",
            ("its runs in float32 and float64, where more may be seen of the cause, were cut off",),
        ),
        ("float32", ("its run in float64, where more may be seen of the cause, was cut off",)),
    ],
)
def test_a_finding_without_a_cause_says_that_nothing_wider_was_asked(
    invoke: Any,
    monkeypatch: pytest.MonkeyPatch,
    case_file: Path,
    tmp_path: Path,
    precision: str,
    notes: tuple[str, ...],
) -> None:
    monkeypatch.setattr(run, "run_cases", run_with_findings)
    monkeypatch.setattr(escalation, "run_cases", interrupt)
    file = tmp_path / "r.json"
    told = invoke("run", case_file, "--set", f"recipe.precision={precision}", "--json", file)
    assert told.exit_code == 130, told.stderr
    assert read_run(file).cases[0].notes == notes


@pytest.mark.parametrize(
    ("narrow", "words", "said"),
    [
        (
            run_with_findings,
            ["--precision", "bfloat16"],
            "2 faults have not been looked at in wider precisions",
        ),
        (run_narrow, ["--precision", "bfloat16"], "2 faults have not been looked at in wider precisions"),
        (run_narrow, ["--precision", "bfloat16", "--no-escalate"], ""),
        (run_with_findings, [], ""),
    ],
)
def test_a_table_of_faults_that_ends_early_says_what_was_not_asked(
    invoke: Any, monkeypatch: pytest.MonkeyPatch, narrow: Any, words: list[str], said: str
) -> None:
    monkeypatch.setattr(escalation, "run_cases", interrupt)

    def stop_behind(cases: Sequence[Case], options: Any, on_event: Any) -> RunResult:
        narrow(cases, options, on_event)
        raise KeyboardInterrupt

    monkeypatch.setattr(fault_benchmark, "run_cases", stop_behind)
    told = invoke("faults", "run", "A01", "A05", *words)
    assert told.exit_code == 130, told.stderr
    shown = " ".join(told.stdout.split())
    assert "A05" in shown
    assert ("in wider precisions" in shown) == bool(said)
    assert said in shown
