"""The end of a command: exit codes of errors, interrupted runs, and a closed output pipe."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from moeverify.cases.validation.load import load_cases
from moeverify.cli.context import find_rank, is_continuous_integration, open_context
from moeverify.cli.keeper import Keeper
from moeverify.cli.outputs import Outputs
from moeverify.errors import CaseError, FormatError, MachineError, Problem, RankFailure
from moeverify.report.formats.json import read_run
from moeverify.results.run import Event


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (CaseError([Problem("wrong", "a.yaml", 3, "layout.tp")]), 2, "a.yaml:3: layout.tp: wrong"),
        (FormatError("cut off"), 2, "error: cut off"),
        (MachineError("no GPU"), 2, "error: no GPU"),
        (RankFailure("rank 3 hung"), 3, "error: rank 3 hung"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ZeroDivisionError("oops"), 3, "ZeroDivisionError: oops"),
        (typer.Exit(1), 1, ""),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_errors_become_exit_codes(
    error: BaseException, code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as caught, open_context():
        raise error
    assert caught.value.exit_code == code
    told = capsys.readouterr()
    assert told.out == ""
    assert text in told.err
    assert ("Traceback" in told.err) == isinstance(error, ZeroDivisionError)


@pytest.mark.parametrize(
    ("number", "code", "text"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "ended by SIGTERM")],
)
def test_an_error_made_of_a_signal_ends_the_command_as_the_signal_does(
    number: int, code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def hide_signal() -> None:
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            raise ValueError("SchemaError: KeyboardInterrupt") from None  # as pydantic does

    with pytest.raises(typer.Exit) as caught, open_context():
        hide_signal()
    assert caught.value.exit_code == code
    assert capsys.readouterr().err.strip() == text


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        ({}, 0),
        ({"RANK": "3", "WORLD_SIZE": "4"}, 3),
        ({"RANK": "3", "WORLD_SIZE": "1"}, 0),
        ({"RANK": "3"}, 0),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "8"}, 2),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "x"}, 0),
        ({"RANK": "0", "WORLD_SIZE": "4", "SLURM_PROCID": "2", "SLURM_NTASKS": "8"}, 0),
    ],
)
def test_find_rank(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], rank: int) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert find_rank() == rank


def test_continuous_integration_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for value in ("true", "1", "false", ""):
        monkeypatch.setenv("CI", value)
        seen.append(is_continuous_integration())
    monkeypatch.delenv("CI")
    assert [*seen, is_continuous_integration()] == [True, True, False, False, False]


def test_early_end_keeps_what_is_there(case_file: Path, keep: Any, tmp_path: Path) -> None:
    shutil.copy(case_file, tmp_path / "second.yaml")
    shutil.copy(case_file, tmp_path / "third.yaml")
    cases = load_cases([case_file, tmp_path / "second.yaml", tmp_path / "third.yaml"])
    finished = read_run(keep("a")).cases[0]
    shown: list[Event] = []
    keeper = Keeper()
    on_event = keeper.watch(shown.append)
    on_event(Event(kind="launch"))
    on_event(Event(kind="case-start", case="fsdp2-2"))
    on_event(Event(kind="case-end", case="fsdp2-2", result=finished))
    on_event(Event(kind="case-start", case="second"))
    assert [event.kind for event in shown] == ["launch", "case-start", "case-end", "case-start"]

    outputs = Outputs({"json": tmp_path / "a.json", "junit": tmp_path / "a.xml"}, tmp_path / "kept")
    with open_context() as context:
        assert outputs.write(keeper.make_partial(cases, KeyboardInterrupt()), context) == []
    run = read_run(tmp_path / "kept")
    assert run.model_dump_json() == read_run(tmp_path / "a.json").model_dump_json()
    assert (run.verdict, run.launches) == ("error", 1)
    assert run.cases[0] == finished
    assert [case.reason for case in run.cases[1:]] == ["interrupted while this case ran", "interrupted"]
    assert [case.verdict for case in run.cases[1:]] == ["skipped", "skipped"]

    failed = keeper.make_partial(cases, RankFailure("rank 1 was killed"))
    assert failed.cases[2].reason == "the run ended early: rank 1 was killed"


def test_outputs_that_fail_do_not_stop_the_others(keep: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = read_run(keep("a"))
    outputs = Outputs({"json": tmp_path / "file" / "a.json", "html": tmp_path / "a.html"})
    with open_context() as context:
        failures = outputs.write(run, context)
    assert len(failures) == 1
    assert failures[0].startswith(f"{tmp_path / 'file' / 'a.json'} was not written: ")
    assert (tmp_path / "a.html").exists()


def test_reader_that_hangs_up_gets_no_traceback(keep: Any) -> None:
    code = "from moeverify.cli import main; main()"
    child = subprocess.Popen(
        [sys.executable, "-c", code, "report", str(keep("a"))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()  # before any output
    assert child.wait(60) == 141
    assert child.stderr.read() == ""
    child.stderr.close()
