"""Interrupted saves: the previous checkpoint is unchanged, and an incomplete one is never accepted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from forked.python import ForkedPython

pytestmark = pytest.mark.timeout(900)  # many pairs of ranks, on a machine that may be busy

SCRIPT = Path(__file__).with_name("interrupted_saves.py")
OLD, NEW = "step-1", "step-2"
# A small private disk in memory, without root's permissions.
OWN_MOUNTS = ("unshare", "--user", "--map-root-user", "--mount")

Trials = Mapping[str, Mapping[str, Any]]


def run(folder: Path, kind: str, command: Sequence[str]) -> Trials:
    command = [*command, str(SCRIPT), str(folder), kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stderr
    found: Trials = json.loads((folder / "found.json").read_text())
    return found


def check_remains(title: str, trial: Mapping[str, Any]) -> None:
    """Check that the old checkpoint is unchanged, and that the new one is complete or can be saved again."""
    assert trial["is old the same"], title
    assert trial["listed"] in ([OLD], [OLD, NEW]), title
    for seen in trial["seen"]:
        assert seen["old"] == "", title
        if NEW in trial["listed"]:
            assert seen["new"] == "", title
        else:
            assert "does not exist" in seen["new"], title
            assert seen["again"] == "", title
    assert trial["left"] == [OLD, NEW], title


def test_a_rank_is_killed_at_any_moment_of_a_save(tmp_path: Path, python: ForkedPython) -> None:
    trials = run(tmp_path, "kills", python.command())
    assert len(trials) == 16
    for title, trial in trials.items():
        check_remains(title, trial)
        killed, left = sorted(trial["ended"], key=lambda end: "signal" not in end)
        assert killed == {"signal": 9}, title
        assert left["error"] == "MachineError", (title, left)
        is_complete = "after the name" in title
        assert (NEW in trial["listed"]) == is_complete, title
        assert ("it is complete" if is_complete else "there is no such checkpoint") in left["text"], title


def test_a_rank_is_killed_from_outside_at_some_time(tmp_path: Path, python: ForkedPython) -> None:
    for title, trial in run(tmp_path, "times", python.command()).items():
        check_remains(title, trial)


def test_an_interrupt_on_one_or_all_ranks(tmp_path: Path, python: ForkedPython) -> None:
    trials = run(tmp_path, "interrupts", python.command())
    assert len(trials) == 8
    for title, trial in trials.items():
        check_remains(title, trial)
        assert trial["ended"][0]["error"] == "KeyboardInterrupt", title
        # A rename that has begun in the background completes: the interrupt waits for it.
        is_complete = "before the name, in the background" in title
        assert (NEW in trial["listed"]) == is_complete, title


def check_refusal(title: str, trial: Mapping[str, Any], rank: int, why: str) -> None:
    check_remains(title, trial)
    assert trial["listed"] == [OLD], title
    for end in trial["ended"]:
        assert end["error"] == "MachineError", (title, end)
        assert f"rank {rank} could not save" in end["text"], title
        assert why in end["text"], title


def test_a_file_that_the_system_lets_no_rank_write(tmp_path: Path, python: ForkedPython) -> None:
    for title, trial in run(tmp_path, "limit", python.command()).items():
        check_refusal(title, trial, 1, "File too large")


def test_a_full_disk(tmp_path: Path) -> None:
    can = subprocess.run(
        [*OWN_MOUNTS, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)], check=False, capture_output=True
    )
    if can.returncode:
        pytest.skip(f"no small disk can be made here: {can.stderr.decode().strip()}")
    trials = run(tmp_path, "disk", [*OWN_MOUNTS, sys.executable])
    assert len(trials) == 6
    for title, trial in trials.items():
        check_refusal(title, trial, 0, "No space left on device")
