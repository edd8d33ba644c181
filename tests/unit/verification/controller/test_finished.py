"""Continuation of an interrupted run: reused verdicts of a file of --keep, and cases that run again."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moeverify.cases.schema import Case
from moeverify.cases.validation.load import load_cases
from moeverify.checksum import open_line, seal_line
from moeverify.errors import CaseError, FormatError
from moeverify.results.finding import Finding, Wider
from moeverify.results.run import CaseResult, Event, RunResult
from moeverify.verification.controller.escalation import needs_escalation
from moeverify.verification.controller.finished import FinishedCases
from moeverify.verification.controller.options import RunOptions

CASE = """\
recipe:
  name: tiny
  model: {vocab_size: 64, hidden: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2, head_dim: 8, ffn_hidden: 64}
layout: {dp_shard: 2}
"""
OPTIONS = RunOptions(device="cpu")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def cases(tmp_path: Path) -> list[Case]:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.yaml").write_text(CASE)
    return _load(tmp_path)


def _load(folder: Path) -> list[Case]:
    return load_cases([folder], overrides=(), pattern=None)


def _make_result(name: str, verdict: Any) -> CaseResult:
    return CaseResult(name=name, file="", verdict=verdict, ranks=2, seconds=1.0)


def _end(finished: FinishedCases, name: str, verdict: Any) -> list[Event]:
    seen: list[Event] = []
    event = Event(kind="case-end", case=name, result=_make_result(name, verdict))
    finished.keeping(seen.append)(event)
    return seen


def _list_left(file: Path, cases: list[Case], options: RunOptions = OPTIONS) -> list[str]:
    return [case.name for case in FinishedCases.open(file, cases, options).list_left(cases)]


def test_verdicts_are_taken_and_lost_ranks_run_again(tmp_path: Path, cases: list[Case]) -> None:
    file = tmp_path / "kept.jsonl"
    first = FinishedCases.open(file, cases, OPTIONS)
    assert first.results == {}
    for name, verdict in (("a", "pass"), ("b", "mismatch"), ("c", "error")):
        assert [event.case for event in _end(first, name, verdict)] == [name]
    assert _list_left(file, cases) == ["c"]
    run = RunResult(verdict="pass", environment={}, cases=(_make_result("c", "pass"),))
    whole = FinishedCases.open(file, cases, OPTIONS).complete(run, cases)
    assert whole is not None
    assert [case.name for case in whole.cases] == ["a", "b", "c"]
    assert whole.verdict == "mismatch"


def test_what_wider_precisions_are_asked_of_is_kept_with_their_answers(
    tmp_path: Path, cases: list[Case]
) -> None:
    file = tmp_path / "kept.jsonl"
    first = FinishedCases.open(file, cases, OPTIONS)
    place = Finding(
        check="gradient", kind="gradient", tensor="w", step=0, rank=0, ranks=(0,), error=1.0, bound=0.1
    )
    open_one = _make_result("a", "mismatch").model_copy(update={"findings": (place,)})
    for name in ("a", "b"):
        event = Event(kind="case-end", case=name, result=open_one.model_copy(update={"name": name}))
        first.keeping(lambda event: None, escalated={"a"})(event)
    assert _list_left(file, cases) == ["a", "c"]
    asked = place.model_copy(update={"wider": (Wider(precision="float64", outcome="alike"),)})
    answered = open_one.model_copy(update={"findings": (asked,)})
    first.keep_rest([answered])
    kept = FinishedCases.open(file, cases, OPTIONS)
    assert kept.results["a"] == answered
    assert not needs_escalation(kept.results["a"])
    assert needs_escalation(kept.results["b"])


def test_a_case_that_has_changed_runs_again(tmp_path: Path, cases: list[Case]) -> None:
    file = tmp_path / "kept.jsonl"
    finished = FinishedCases.open(file, cases, OPTIONS)
    for case in cases:
        _end(finished, case.name, "pass")
    (tmp_path / "b.yaml").write_text(CASE.replace("dp_shard: 2", "dp_replicate: 2"))
    assert _list_left(file, _load(tmp_path)) == ["b"]
    assert _list_left(file, cases, replace(OPTIONS, case_faults={"c": "a:b"})) == ["c"]


def test_code_of_the_users_own_that_has_changed_runs_again(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(CASE.replace("dp_shard: 2", "dp_shard: 2, parallelize: 'own:divide'"))
    (tmp_path / "own.py").write_text("def divide(model, mesh):\n    return model\n")
    cases, file = _load(tmp_path), tmp_path / "kept.jsonl"
    _end(FinishedCases.open(file, cases, OPTIONS), "a", "mismatch")
    assert _list_left(file, cases) == []
    (tmp_path / "own.py").write_text("def divide(model, mesh):\n    return divided(model)\n")
    assert _list_left(file, cases) == ["a"]


def test_what_stands_beside_the_users_code_and_is_none_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(CASE.replace("dp_shard: 2", "dp_shard: 2, parallelize: 'own:divide'"))
    (tmp_path / "own.py").write_text("def divide(model, mesh):\n    return model\n")
    cases, file = _load(tmp_path), tmp_path / "kept.jsonl"
    _end(FinishedCases.open(file, cases, OPTIONS), "a", "pass")
    (tmp_path / ".#own.py").symlink_to("user@host.4711")  # Emacs locks an edited file like this
    (tmp_path / "folder.py").mkdir()
    os.mkfifo(tmp_path / "pipe.py")
    assert _list_left(file, cases) == []


def test_a_line_that_was_cut_off_runs_again(tmp_path: Path, cases: list[Case]) -> None:
    file = tmp_path / "kept.jsonl"
    finished = FinishedCases.open(file, cases, OPTIONS)
    for case in cases:
        _end(finished, case.name, "pass")
    file.write_text(file.read_text()[:-20])
    assert _list_left(file, cases) == ["c"]


def test_a_file_of_other_code_or_of_something_else_is_refused(tmp_path: Path, cases: list[Case]) -> None:
    file = tmp_path / "kept.jsonl"
    FinishedCases.open(file, cases, OPTIONS)
    header = open_line(file.read_bytes().removesuffix(b"\n"))
    file.write_bytes(seal_line(header.replace(b'"torch": "', b'"torch": "1')) + b"\n")
    with pytest.raises(CaseError, match="was kept by other code, with other options or on another machine"):
        FinishedCases.open(file, cases, OPTIONS)
    file.write_text("a diary\n")
    with pytest.raises(FormatError, match=r"kept\.jsonl:1: damaged, or written by an older version"):
        FinishedCases.open(file, cases, OPTIONS)
    with pytest.raises(CaseError, match="cannot write"):
        FinishedCases.open(Path("/proc/kept.jsonl"), cases, OPTIONS)


def test_a_full_disk_costs_the_file_alone(
    tmp_path: Path, cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = FinishedCases.open(tmp_path / "kept.jsonl", cases, OPTIONS)

    def fail(self: Path, *_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", fail)
    assert [event.case for event in _end(finished, "a", "pass")] == ["a"]
    (failure,) = finished.failures
    assert "lacks the verdict of a: No space left on device" in failure
