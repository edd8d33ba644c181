"""The exit code of an undecided case, and the options that change it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from moeverify.cases.schema import Case
from moeverify.report.formats.json import read_run
from moeverify.results.run import CaseResult, Event, RunResult
from moeverify.verification.controller import escalation, run

WHY = "gradient: 3 of 58 tensors decided at 20 %"
NARROW = ("--set", "recipe.precision=bfloat16")


def make_runner(verdict: Any, asked: list[str]) -> Callable[..., RunResult]:
    """Return a replacement of `run_cases` that notes the precision and whether a pass needs evidence."""

    def do(cases: Sequence[Case], options: Any, on_event: Callable[[Event], None]) -> RunResult:
        results = []
        for case in cases:
            asked.append(f"{case.recipe.precision} {options.must_decide}")
            reason = WHY if verdict == "undecided" else ""
            result = CaseResult(
                name=case.name, file=case.file, verdict=verdict, reason=reason, ranks=2, seconds=1.0
            )
            on_event(Event(kind="case-end", case=case.name, result=result, num_done=1, num_total=1))
            results.append(result)
        return RunResult(verdict=verdict, environment={}, seconds=1.0, launches=1, cases=tuple(results))

    return do


@pytest.mark.parametrize(
    ("words", "wide", "code", "verdict", "precisions"),
    [
        ((), "pass", 0, "pass", ["bfloat16 True", "float64 True"]),
        ((), "undecided", 4, "undecided", ["bfloat16 True", "float64 True"]),
        (("--no-escalate",), "pass", 4, "undecided", ["bfloat16 True"]),
        (("--no-escalate", "--allow-undecided"), "pass", 0, "undecided", ["bfloat16 True"]),
        (("--allow-undecided",), "error", 0, "undecided", ["bfloat16 True", "float64 True"]),
    ],
)
def test_an_undecided_case_has_an_exit_code_of_its_own(
    invoke: Any,
    monkeypatch: pytest.MonkeyPatch,
    case_file: Path,
    tmp_path: Path,
    words: tuple[str, ...],
    wide: str,
    code: int,
    verdict: str,
    precisions: list[str],
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(run, "run_cases", make_runner("undecided", asked))
    monkeypatch.setattr(escalation, "run_cases", make_runner(wide, asked))
    file = tmp_path / "r.json"
    told = invoke("run", case_file, *NARROW, *words, "--json", file)
    assert told.exit_code == code, told.stderr
    kept = read_run(file)
    assert (kept.verdict, kept.cases[0].verdict) == (verdict, verdict)
    assert kept.cases[0].decided_in == ("float64" if verdict == "pass" else "")
    assert kept.allows_undecided == ("--allow-undecided" in words)
    assert asked == precisions
    assert WHY in " ".join(told.stdout.split())


def test_an_undecided_case_is_not_kept_as_finished(
    invoke: Any, monkeypatch: pytest.MonkeyPatch, case_file: Path, tmp_path: Path
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(run, "run_cases", make_runner("undecided", asked))
    words = (*NARROW, "--no-escalate", "--keep", tmp_path / "kept")
    for number in (1, 2):
        assert invoke("run", case_file, *words).exit_code == 4
        assert len(asked) == number
