"""A warm server: later commands take their ranks from it, with their own environment and folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from moeverify.errors import MachineError
from moeverify.results.probe import Probe
from moeverify.verification.controller.tasks import make_job
from moeverify.verification.jobs import ProbeJob
from moeverify.verification.launch import warm
from moeverify.verification.launch.launcher import run_jobs

pytestmark = pytest.mark.usefixtures("python_as_users_start_it")

JOB = make_job("a", 2, 60.0, ProbeJob(probe=Probe.SUMS))
ENTRY = """
import json, os, sys, pathlib
from moeverify.verification.launch.rank import serve
import psutil

def tell(context, job):
    agent = psutil.Process().parent()
    return {"folder": os.getcwd(), "sun": os.environ.get("SUN"), "server": agent.ppid()}

serve(sys.argv[1], tell)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "entry.py").write_text(ENTRY)
    yield tmp_path
    warm.stop_servers()


def ask(folder: Path, name: str) -> dict[str, object]:
    (outcome,) = run_jobs([JOB], entry=str(folder / "entry.py"), folder=folder / name)
    assert outcome.state == "done", outcome
    return dict(outcome.result or {})


def test_ranks_come_from_the_server_as_long_as_their_imports_would_be_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not warm.is_serving("cpu")
    server = warm.start_server("cpu", idle=60.0)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SUN", "shines")
    assert ask(folder, "run") == {"folder": str(folder), "sun": "shines", "server": server}
    assert not warm.is_serving("cuda")
    with monkeypatch.context() as changed:
        changed.setenv("OMP_NUM_THREADS", "3")  # torch has read another value in the server
        assert not warm.is_serving("cpu")
    (place,) = (folder / f"moeverify-serve-{os.getuid()}").glob("*.socket")
    psutil.Process(server).kill()
    psutil.wait_procs([psutil.Process(server)], timeout=20)
    assert not warm.is_serving("cpu")
    assert warm.stop_servers() == 0
    assert not place.exists()


def test_a_command_of_many_launches_ends_only_its_own_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warm.warm_server("cpu"):
        own = ask(folder, "own")["server"]
        with warm.warm_server("cpu"):
            assert ask(folder, "same")["server"] == own
        assert warm.is_serving("cpu")
    assert not warm.is_serving("cpu")

    def refuse(*_: object) -> int:
        raise MachineError("the server did not start")

    monkeypatch.setattr(warm, "start_server", refuse)
    with warm.warm_server("cpu"):
        assert not warm.is_serving("cpu")


def test_a_server_ends_by_itself_and_leaves_no_socket(folder: Path) -> None:
    server = psutil.Process(warm.start_server("cpu", idle=1.0))
    server.wait(timeout=60)
    assert not warm.is_serving("cpu")
    assert not list(folder.glob("moeverify-serve-*/*"))


def test_a_folder_that_others_can_enter_is_not_used(folder: Path) -> None:
    place = folder / f"moeverify-serve-{os.getuid()}"
    place.mkdir(mode=0o755)
    with pytest.raises(MachineError, match="mode 700"):
        warm.is_serving("cpu")
    with (folder / "log").open("wb") as log:
        assert warm.start_warm_agent(folder / "plan.json", "cpu", log) is None
    place.rmdir()
