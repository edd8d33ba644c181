"""`--debug` on real ranks: they stop where the first finding is made, and a console sees what was expected."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moeverify.controller.debug import debug_case, find_stop
from moeverify.controller.options import RunOptions
from moeverify.controller.run import run_cases
from moeverify.faults.catalogue import load_faults

pytestmark = pytest.mark.timeout(900)


def test_ranks_stop_where_the_first_finding_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPDB_JOB", "debugged")
    monkeypatch.setenv("MPDB_DIR", str(tmp_path / "sockets"))
    fault = load_faults()["A01"]  # gradients of experts become twice as large
    size = fault.case.layout.world_size
    options = RunOptions(
        device="cpu", cache_folder=tmp_path, golden_folder=Path("no", "goldens"), fault=fault.target
    )
    result = run_cases([fault.case], options, lambda event: None)
    assert result is not None
    at = find_stop(result.cases[0])
    assert at is not None
    (first,) = [finding for finding in result.cases[0].findings if not finding.follows]
    assert (at.kind, at.tensor, at.step) == ("gradient", first.tensor, 0)
    consoles = []

    def open_console() -> None:
        asked = [
            f"wait {size}",
            "@all p (actual.double() / expected).median().item()",
            "@all p step",
            "@all c",
        ]
        commands = [word for each in asked for word in ("-c", each)]
        consoles.append(
            subprocess.Popen(
                [sys.executable, "-m", "multiprocessing_pdb", "debugged", *commands],
                stdout=subprocess.PIPE,
                text=True,
            )
        )

    assert debug_case(fault.case, at, options, open_console) == tuple(range(size))
    (console,) = consoles
    said, _ = console.communicate(timeout=60)
    assert said.count("2.0") >= 1, said
    assert f"ranks 0-{size - 1}: 0" in said, said
    assert not list((tmp_path / "sockets").iterdir())
