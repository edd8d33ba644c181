"""Clean runs in parts: kept results are not run again, and never mixed with results of other code."""

import os

import pytest

from moeverify.errors import CaseError, FormatError
from moeverify.results.benchmark_rows import CleanRow
from moeverify.results.run import CaseResult, Event
from moeverify.verification.controller import clean_matrix as clean
from moeverify.verification.controller import kept
from moeverify.verification.controller.kept import KeptRows
from moeverify.verification.controller.options import RunOptions

HERE = {"torch": "2.13"}


def row(name, verdict="pass"):
    return CleanRow(name=name, group="float64", verdict=verdict, worst=0.5)


def test_rows_are_read_again_and_a_cut_off_one_is_not(tmp_path):
    path = tmp_path / "rows"
    KeptRows(path, HERE, CleanRow).add(row("a"))
    KeptRows(path, HERE, CleanRow).add(row("b", "mismatch"))
    whole = path.read_text()
    path.write_text(whole[:-9])
    again = KeptRows(path, HERE, CleanRow)
    assert list(again.rows) == ["a"]
    again.add(row("b", "mismatch"))
    assert path.read_text() == whole


def test_rows_of_other_code_or_another_machine_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "rows"
    KeptRows(path, HERE, CleanRow).add(row("a"))
    with pytest.raises(CaseError, match="other code, with other options or on another machine"):
        KeptRows(path, {"torch": "2.11"}, CleanRow)
    monkeypatch.setattr(kept, "code_version", lambda: "0")
    with pytest.raises(CaseError, match="other code, with other options or on another machine"):
        KeptRows(path, HERE, CleanRow)


def test_without_a_file_rows_are_kept_in_memory_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = KeptRows(None, HERE, CleanRow)
    rows.add(row("a"))
    assert rows.rows == {"a": row("a")}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["no JSON\n", "{}\n{}\n"])
def test_a_file_of_somebody_else_is_refused(tmp_path, text):
    path = tmp_path / "rows"
    path.write_text(text)
    with pytest.raises((FormatError, CaseError)):
        KeptRows(path, HERE, CleanRow)
    assert path.read_text() == text


def test_a_damaged_line_is_named_and_nothing_is_lost(tmp_path):
    path = tmp_path / "rows"
    KeptRows(path, HERE, CleanRow).add(row("a"))
    KeptRows(path, HERE, CleanRow).add(row("b"))
    header, first, second, _ = path.read_bytes().split(b"\n")
    for damaged in (first[:9] + b"\xff" + first[10:], b"[" * 100_000, b"{}", b""):
        content = b"\n".join([header, damaged, second, b""])
        path.write_bytes(content)
        with pytest.raises(FormatError, match=":2: damaged"):
            KeptRows(path, HERE, CleanRow)
        assert path.read_bytes() == content
    for damaged in (b"\xff" + header, b"[" * 100_000, b"9" * 5000):
        path.write_bytes(b"\n".join([damaged, first, b""]))
        with pytest.raises((FormatError, CaseError)):
            KeptRows(path, HERE, CleanRow)


def test_a_header_that_lacks_its_end_is_completed(tmp_path):
    path = tmp_path / "rows"
    KeptRows(path, HERE, CleanRow)
    path.write_bytes(path.read_bytes()[:-1])
    KeptRows(path, HERE, CleanRow).add(row("a"))
    assert list(KeptRows(path, HERE, CleanRow).rows) == ["a"]


def test_rows_that_were_read_stay_where_the_disk_refuses_to_mend_the_file(tmp_path, monkeypatch):
    path = tmp_path / "rows"
    KeptRows(path, HERE, CleanRow).add(row("a"))
    with path.open("a") as file:
        file.write('{"name": "cut off')
    content = path.read_bytes()

    def refuse(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        KeptRows(path, HERE, CleanRow)
    assert path.read_bytes() == content


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CaseError, match="no regular file"):
        KeptRows(tmp_path / "pipe", HERE, CleanRow)


def test_only_what_is_left_is_run(tmp_path, monkeypatch):
    runs = clean.choose_clean(1)[:3]
    names = [case.name for _, case, _ in runs]
    started = []

    def run_cases(cases, options, on_event):
        for case in cases:
            started.append(case.name)
            ended = CaseResult(name=case.name, file="", verdict="pass", ranks=2, seconds=1.0)
            on_event(Event(kind="case-end", case=case.name, result=ended))

    monkeypatch.setattr(clean, "run_cases", run_cases)
    rows = KeptRows(tmp_path / "rows", HERE, CleanRow)
    rows.add(row(names[1], "mismatch"))
    found = clean.run_clean(runs, RunOptions(), lambda event: None, rows)
    assert started == [names[0], names[2]]
    assert [(each.name, each.verdict) for each in found] == [
        (names[0], "pass"),
        (names[1], "mismatch"),
        (names[2], "pass"),
    ]
    assert (
        clean.run_clean(runs, RunOptions(), lambda event: None, KeptRows(rows.path, HERE, CleanRow)) == found
    )
    assert len(started) == 2
