"""`moeverify doctor`: its findings on this machine, and its handling of probes that crash or hang."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console
from rich.text import Text

from moeverify.report.progress import LiveProgress
from moeverify.results.probe import Probe, ProbeRow
from moeverify.results.run import Event
from moeverify.verification.controller import doctor
from moeverify.verification.controller.doctor import Try

ODD = str(Path(__file__).parent / "programs" / "odd_probes.py")


@pytest.mark.ranks
def test_every_probe_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "count_gpus", lambda: 0)
    examination = doctor.Examination()
    seen = [row.name for row in examination.rows]
    assert "torch" in seen
    assert {*seen, *examination.missing} == set(examination.names)
    examination.run(lambda event: seen.append(event.case) if event.row is not None else None)
    assert sorted(seen) == sorted(examination.names)  # each is reported once
    assert [row.name for row in examination.rows] == list(examination.names)
    assert examination.missing == []
    rows = {row.name: row for row in examination.rows}
    tried = {each.name for each in doctor.CPU_TRIES}
    assert set(rows) >= {"torch", "python", "cores", "ranks on the CPU", "GPUs", *tried}
    assert {name: row.value for name, row in rows.items() if row.status == "fail"} == {}
    for name in ("gloo collectives", "gloo reduce_scatter AVG", "gloo uneven all_to_all", "grouped_mm"):
        assert "right" in rows[name].value
    assert "contiguity" in rows["gloo strided all_reduce"].meaning
    assert rows["GPUs"].status == "warn"


@pytest.mark.ranks
def test_a_probe_that_fails_or_hangs_is_a_row_and_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "PROBE_TIMEOUTS", {"cpu": 2.0})
    tries = [Try(name, name, 2) for name in ("crash", "fail", "hang")]
    tries.append(Try("average by sum", Probe.AVERAGE, 2))
    rows = {row.name: row for row in doctor.run_probes(tries, "cpu", ODD)}
    assert sorted(rows) == ["average by sum", "crash", "fail", "hang"]
    assert list(rows)[-1] == "hang"  # it was retried after the others had ended
    assert {row.status for row in rows.values()} == {"fail"}
    assert rows["crash"].value.startswith("crashes: ")
    assert "SIGABRT" in rows["crash"].value
    assert "no such thing" in rows["fail"].value
    assert rows["hang"].value.startswith("hangs: ")
    assert rows["average by sum"].value == "returns the sum"


@pytest.mark.ranks
def test_what_a_busy_machine_has_kept_from_its_end_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "PROBE_TIMEOUTS", {"cpu": 2.0})
    monkeypatch.setenv("FIRST_TRY", str(tmp_path / "first"))
    begun: list[str] = []
    (row,) = doctor.run_probes([Try("late", Probe.STRIDED, 2)], "cpu", ODD, on_start=begun.append)
    assert (tmp_path / "first").exists()
    assert begun == ["late", "late"]
    assert row.value == "right"


@pytest.mark.ranks
def test_what_runs_ends_where_nobody_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tempfile, "tempdir", str(tmp_path)
    )  # no server runs there, which would own the processes
    left: list[psutil.Process] = []
    before = psutil.Process().children(recursive=True)  # processes that other tests have started

    def note(name: str) -> None:
        if name == "hang":
            left.extend(each for each in psutil.Process().children(recursive=True) if each not in before)
            raise KeyboardInterrupt

    rows = doctor.run_probes([Try("fail", "fail", 2), Try("hang", "hang", 2)], "cpu", ODD, on_start=note)
    assert next(rows).name == "fail"
    with pytest.raises(KeyboardInterrupt):
        next(rows)
    assert len(left) >= 3  # the agent of the hanging probe, and its ranks
    assert psutil.wait_procs(left, timeout=20)[1] == []


def test_collectives_are_tried_on_one_gpu_that_two_ranks_share() -> None:
    names = {num_gpus: [each.name for each in doctor.list_gpu_tries(num_gpus)] for num_gpus in range(3)}
    assert names[0] == []
    assert "gloo collectives on a shared GPU" in names[1]
    assert not any(name.startswith("nccl ") for name in names[1])
    assert "nccl collectives" in names[2]
    assert not any(name.endswith("shared GPU") for name in names[2])


class Asked(doctor.Examination):
    """An examination whose only probe returns `row` or is interrupted."""

    row: ProbeRow | None = None

    def __init__(self) -> None:
        self._found = {"host": ProbeRow(name="host", value="here", meaning="")}
        self.names = ("host", "gloo", "nccl")

    def run(self, on_event: Callable[[Event], None] = lambda event: None) -> None:
        for name in ("gloo", "nccl"):
            on_event(Event(kind="case-start", case=name, num_done=len(self.rows), num_total=3))
            if self.row is None and name == "nccl":
                raise KeyboardInterrupt
            status = "ok" if self.row is None else self.row.status
            row = ProbeRow(name=name, value="sums wrong", meaning="no verdict can be trusted", status=status)
            self._found[name] = row
            on_event(Event(kind="case-end", case=name, row=row, num_done=len(self.rows), num_total=3))


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warn", 0), ("fail", 2)])
def test_exit_code(invoke: Any, monkeypatch: pytest.MonkeyPatch, status: Any, code: int) -> None:
    monkeypatch.setattr(Asked, "row", ProbeRow(name="", value="", meaning="", status=status))
    monkeypatch.setattr(doctor, "Examination", Asked)
    told = invoke("doctor")
    assert told.exit_code == code
    assert "no verdict can be trusted" in told.stdout
    assert f"{2 + (status == 'ok')} {status}" in told.stdout.splitlines()[-1].split(", not")[0]
    ends = [line.split(":")[0].split() for line in told.stderr.splitlines() if line.startswith("[")]
    assert ends == [["[2/3]", status, "gloo"], ["[3/3]", status, "nccl"]]


def test_an_interrupt_leaves_the_rows_that_are_known(invoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "Examination", Asked)
    told = invoke("doctor")
    assert told.exit_code == 130
    assert "sums wrong" in told.stdout
    last = told.stdout.splitlines()[-1]
    assert last == "2 ok, 0 warn, 0 fail, 1 not probed: nccl"
    assert told.stderr.splitlines()[-1] == "interrupted"


def test_a_terminal_shows_what_runs_and_what_was_found() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=60)
    progress = LiveProgress(console, clock=lambda: 0.0, noun="probe")
    row = ProbeRow(name="gloo", value=40 * "right ", meaning="", status="warn")
    progress.on_event(Event(kind="case-end", case="gloo", row=row, num_done=3, num_total=4))
    progress.on_event(Event(kind="case-start", case="nccl", num_done=3, num_total=4))
    console.print(progress.render())
    found, count, running = Text.from_ansi(out.getvalue()).plain.splitlines()
    assert found.startswith("warn gloo: right")
    assert len(found) < 60
    assert "3 of 4 probes" in count
    assert running.startswith("running nccl")
