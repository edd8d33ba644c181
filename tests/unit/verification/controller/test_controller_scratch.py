"""Temporary folders: removed with their command, or by the next one if the command was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import moeverify
from moeverify.verification.controller.scratch import scratch_folder

HOLDER = """\
import sys
from moeverify.verification.controller.scratch import scratch_folder
with scratch_folder() as folder:
    (folder / "large").write_text("a checkpoint")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder for temporary files, for this process and those that it starts."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def holder(place: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Yield a process that holds a folder until told to end, and the folder."""
    path = os.pathsep.join([str(Path(moeverify.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_a_folder_is_gone_afterwards(place: Path) -> None:
    with scratch_folder() as folder:
        assert folder.parent == place
        (folder / "file").write_text("")
    assert list(place.iterdir()) == []


def test_what_a_killed_process_has_left_is_removed(
    place: Path, holder: tuple[subprocess.Popen[str], Path]
) -> None:
    process, left = holder
    process.kill()
    process.wait(timeout=20)
    assert (left / "large").exists()
    with scratch_folder() as folder:
        assert list(place.iterdir()) == [folder]


def test_what_another_process_holds_is_left_alone(
    place: Path, holder: tuple[subprocess.Popen[str], Path]
) -> None:
    _, held = holder
    (place / "moeverify-pytest-1").mkdir()
    with scratch_folder(), scratch_folder():
        assert (held / "large").exists()
    assert sorted(place.iterdir()) == sorted([held, place / "moeverify-pytest-1"])
