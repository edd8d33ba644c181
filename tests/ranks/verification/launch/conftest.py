"""Shared by the launch tests: the programs that the ranks run, and a search for the remains of a launch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from forked.python import ForkedPython

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture
def python_as_users_start_it(python: ForkedPython) -> Iterator[None]:
    """Import everything anew in every launch, for tests whose subject is the start or end of processes."""
    with python.pause():
        yield


@pytest.fixture(scope="session")
def programs() -> Path:
    return PROGRAMS


def find_processes(folder: Path) -> list[int]:
    """Return the processes of launches below `folder`: forked ranks have their agent's command line."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and any(
                str(folder) in word for word in process.cmdline()
            ):
                found.append(process.pid)
    return found


class Remains:
    """A search for the remains of the launches below a folder."""

    def list_processes(self, folder: Path) -> list[int]:
        return find_processes(folder)

    def wait_for_none(self, folder: Path, seconds: float = 10.0) -> list[int]:
        """Return the processes that still exist after this time; there should be none."""
        end = time.monotonic() + seconds
        while (left := find_processes(folder)) and time.monotonic() < end:
            time.sleep(0.05)
        return left


@pytest.fixture(scope="session")
def remains() -> Remains:
    return Remains()
