"""Agents forked from one process: many launches, and one import."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from moeverify.results.probe import Probe
from moeverify.verification.controller.tasks import make_job
from moeverify.verification.jobs import PROBE_WORKER, ProbeJob
from moeverify.verification.launch.forked_agents import AgentServer
from moeverify.verification.launch.launcher import run_jobs

pytestmark = pytest.mark.usefixtures("python_as_users_start_it")

JOB = make_job("a", 2, 60.0, ProbeJob(probe=Probe.SUMS))


def test_launches_share_a_process_and_outlive_it(tmp_path: Path) -> None:
    before = psutil.Process().children()
    servers = []
    with AgentServer() as agents:
        for number in range(3):
            folder = tmp_path / str(number)
            (outcome,) = run_jobs([JOB], entry=PROBE_WORKER, folder=folder, start=agents.start)
            assert outcome.state == "done", outcome
            (server,) = [each for each in psutil.Process().children() if each not in before]
            servers.append(server)
            if number == 1:
                server.kill()
                psutil.wait_procs([server], timeout=20)
    assert servers[0] == servers[1] != servers[2]
    assert not any(server.is_running() for server in servers)
    with pytest.raises(OSError, match="any more"), (tmp_path / "log").open("wb") as log:
        agents.start(tmp_path / "plan.json", log)
