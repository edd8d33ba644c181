"""`moeverify doctor`: what it finds here, and what becomes of probes that crash or hang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moeverify.controller import doctor
from moeverify.controller.doctor import Try
from moeverify.results.probe import Probe, ProbeRow

ODD = str(Path(__file__).parent / "programs" / "odd_probes.py")


@pytest.mark.ranks
def test_every_probe_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "count_gpus", lambda: 0)
    rows = {row.name: row for row in doctor.examine()}
    tried = {each.name for each in doctor.CPU_TRIES}
    assert set(rows) >= {"torch", "python", "cores", "ranks on the CPU", "GPUs", *tried}
    assert {name: row.value for name, row in rows.items() if row.status == "fail"} == {}
    for name in ("gloo collectives", "gloo reduce_scatter AVG", "gloo uneven all_to_all", "grouped_mm"):
        assert "right" in rows[name].value
    assert "contiguity" in rows["gloo strided all_reduce"].meaning
    assert rows["GPUs"].status == "warn"


@pytest.mark.ranks
def test_a_probe_that_fails_or_hangs_is_a_row_and_costs_the_next_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "PROBE_TIMEOUTS", {"cpu": 3.0})
    tries = [Try(name, name, 2) for name in ("crash", "fail", "hang")]
    tries.append(Try("average by sum", Probe.AVERAGE, 2))
    rows = {row.name: row for row in doctor.run_probes(tries, "cpu", ODD)}
    assert list(rows) == ["crash", "fail", "hang", "average by sum"]
    assert {row.status for row in rows.values()} == {"fail"}
    assert rows["crash"].value.startswith("crashes: ")
    assert "SIGABRT" in rows["crash"].value
    assert "no such thing" in rows["fail"].value
    assert rows["hang"].value.startswith("hangs: ")
    assert rows["average by sum"].value == "returns the sum"


def test_collectives_are_tried_on_one_gpu_that_two_ranks_share() -> None:
    names = {num_gpus: [each.name for each in doctor.list_gpu_tries(num_gpus)] for num_gpus in range(3)}
    assert names[0] == []
    assert "gloo collectives on a shared GPU" in names[1]
    assert not any(name.startswith("nccl ") for name in names[1])
    assert "nccl collectives" in names[2]
    assert not any(name.endswith("shared GPU") for name in names[2])


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warn", 0), ("fail", 2)])
def test_exit_code(invoke: Any, monkeypatch: pytest.MonkeyPatch, status: Any, code: int) -> None:
    row = ProbeRow(name="gloo", value="sums wrong", meaning="no verdict can be trusted", status=status)
    monkeypatch.setattr(doctor, "examine", lambda: [row])
    told = invoke("doctor")
    assert told.exit_code == code
    assert "no verdict can be trusted" in told.stdout
    assert f"1 {status}" in told.stdout.splitlines()[-1]
