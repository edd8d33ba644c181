"""Commands that read kept runs: the output and exit codes of report and diff."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from moeverify.checksum import seal
from moeverify.report.progress import OnPart


def test_report_shows_a_run_and_writes_other_formats(invoke: Any, keep: Any, tmp_path: Path) -> None:
    run = keep("a", "mismatch", 1.0)
    files = [tmp_path / "out" / name for name in ("r.html", "r.xml", "r.json")]
    result = invoke("report", run, "--html", files[0], "--junit", files[1], "--json", files[2])
    assert result.exit_code == 0
    assert "MISMATCH  1 case: 1 mismatch" in result.stdout
    assert f"moeverify report {run} --html" in result.stdout
    assert "head.weight" in files[0].read_text()
    assert ET.parse(files[1]).getroot().get("failures") == "1"
    assert files[2].read_text() == (run / "result.json").read_text()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("report", "{run}"), "reading {run}"),
        (("explain", "{run}"), "reading {run}"),
        (("diff", "{run}", "{run}"), "comparing {run} with {run}"),
        (("history", "{folder}"), "reading the runs in {folder}"),
    ],
)
def test_a_long_reading_of_runs_says_so(
    words: tuple[str, ...], line: str, invoke: Any, keep: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, parts = [], []

    @contextmanager
    def show_work(console: Any, text: str, *, quiet: bool = False) -> Iterator[OnPart]:
        shown.append(text)
        yield lambda *part: parts.append(part)

    monkeypatch.setattr("moeverify.report.progress.show_work", show_work)
    run = keep("a")
    assert invoke(*(each.format(run=run, folder=run.parent) for each in words)).exit_code == 0
    assert shown == [line.format(run=run, folder=run.parent)]
    assert parts == ([(0, 1)] if words[0] == "history" else [])


def test_report_takes_a_file_too(invoke: Any, keep: Any) -> None:
    result = invoke("report", keep("a") / "result.json")
    assert result.exit_code == 0
    assert "1e-15 / 1e-10" in result.stdout


def test_report_of_nothing_is_usage(invoke: Any, tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text('{"schema_version": 1,')
    for path in (tmp_path / "nothing", tmp_path, tmp_path / "cut.json"):
        result = invoke("report", path)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr.startswith(f"error: {path}")
        assert "Traceback" not in result.stderr


def test_report_that_cannot_be_written_is_usage(invoke: Any, keep: Any, tmp_path: Path) -> None:
    result = invoke("report", keep("a"), "--html", tmp_path)
    assert result.exit_code == 2
    assert f"{tmp_path} is a folder" in result.stderr


def test_a_file_that_cannot_be_drawn_costs_no_other(
    invoke: Any, keep: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(run: Any, path: Path) -> None:
        raise ValueError("no glyph")

    monkeypatch.setattr("moeverify.report.formats.html.write", draw)
    result = invoke(
        "report", keep("a", "mismatch", 1.0), "--html", tmp_path / "a.html", "--csv", tmp_path / "a.csv"
    )
    assert result.exit_code == 2
    assert "MISMATCH  1 case" in result.stdout
    assert f"error: {tmp_path / 'a.html'} was not written: ValueError: no glyph" in result.stderr
    assert (tmp_path / "a.csv").is_file()


def test_diff_exit_codes(invoke: Any, keep: Any, tmp_path: Path) -> None:
    passed, closer, failed = keep("a"), keep("b", error=9e-11), keep("c", "mismatch", 1.0)
    same = invoke("diff", passed, passed / "result.json")
    assert (same.exit_code, same.stdout.splitlines()[0][:13]) == (0, "same verdicts")
    near = invoke("diff", passed, closer)
    assert near.exit_code == 0
    assert "fsdp2-2 gradient  1e-15 / 1e-10 -> 9e-11 / 1e-10 (head.weight)" in near.stdout
    differ = invoke("diff", passed, failed)
    assert differ.exit_code == 1
    assert "fsdp2-2  pass -> mismatch" in differ.stdout
    assert invoke("diff", passed, tmp_path / "nothing").exit_code == 2
    assert invoke("diff", passed).exit_code == 2


def test_newer_run_says_to_upgrade(invoke: Any, keep: Any) -> None:
    path = keep("a") / "result.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "schema_version": 99}))
    result = invoke("report", path)
    assert result.exit_code == 2
    assert "schema_version: version 99" in result.stderr
    assert "upgrade moeverify" in result.stderr


def test_history_lists_kept_runs_in_the_order_of_their_times(invoke: Any, keep: Any, tmp_path: Path) -> None:
    for name, started, *rest in (
        ("new", "2026-02-01T10:00:00+00:00", "mismatch", 1.0),
        ("old", "2026-01-01T09:00:00+00:00"),
    ):
        path = keep(name, *rest) / "result.json"
        content = json.loads(path.read_text()) | {"started": started}
        del content["checksum"]
        path.write_text(seal(json.dumps(content)))
    result = invoke("history", tmp_path)
    assert (result.exit_code, result.stderr) == (0, "")
    rows = [line.split() for line in result.stdout.splitlines()[2:]]
    assert rows[0] == ["2026-01-01", "09:00", "old", "1", "of", "1", "1e-05", "1.5", "pass", *rows[0][9:]]
    assert rows[1][:9] == ["2026-02-01", "10:00", "new", "0", "of", "1", "1e10", "1.5", "MISMATCH"]
    assert " ".join(rows[1][9:]) == "fsdp2-2, gradient: head.weight"
    assert invoke("history", tmp_path, "-k", "fsdp2 and not tp").stdout == result.stdout
    told = invoke("history", tmp_path, "-k", "(")
    assert (told.exit_code, told.stdout) == (2, "")
    assert "-k: `(` cannot be read" in told.stderr


def test_history_says_what_it_cannot_read_and_lists_the_rest(invoke: Any, keep: Any, tmp_path: Path) -> None:
    keep("a")
    (tmp_path / "cut.json").write_text('{"schema_version": 1,')
    result = invoke("history", tmp_path)
    assert result.exit_code == 2
    assert f"left out: {tmp_path / 'cut.json'}:1: not valid JSON, or it was cut off" in result.stderr
    assert " a " in result.stdout
    for words in ((tmp_path, "-k", "tp"), (tmp_path / "nothing",)):
        result = invoke("history", *words)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "has no run" in result.stderr
