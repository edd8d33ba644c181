"""The monitor of a launch, where a job starts, ends and takes its agent along between two looks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from moeverify.verification.launch.monitor import LaunchMonitor
from moeverify.verification.launch.plan import Job, LaunchEvent, LaunchPlan

PASSED = {"result": {"loss": 1.0}, "seconds": 0.0}


class Agent:
    """Agent that `act`s when the monitor asks whether it has ended."""

    pid = 1
    returncode: int | None = None

    def __init__(self, act: Callable[[], int | None] = lambda: None) -> None:
        self._act = act

    def poll(self) -> int | None:
        self.returncode = self.returncode if self.returncode is not None else self._act()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def terminate(self) -> None:
        self.returncode = 0


@pytest.fixture
def plan(tmp_path: Path) -> LaunchPlan:
    job = Job(name="case", num_ranks=1, timeout=5.0, payload={})
    return LaunchPlan(
        jobs=(job,), entry="none", num_ranks=1, folder=tmp_path, launch_folder=tmp_path / "launch"
    )


def finish(plan: LaunchPlan) -> None:
    """Write the files of a rank that starts the job and ends it."""
    folder = plan.job_folder(0)
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "rank-0.started").touch()
    (folder / "result.json").write_text(json.dumps(PASSED))


def follow(plan: LaunchPlan, agent: Agent) -> list[str]:
    """Return the kinds of the events about the job, with the state at its end."""
    seen: list[LaunchEvent] = []

    def note(event: LaunchEvent) -> None:
        seen.append(event)
        if event.kind == "end":
            agent.terminate()

    (outcome,) = LaunchMonitor(plan, 1, note, lambda *_: agent).follow()
    return [*(event.kind for event in seen if event.job), outcome.state]


def test_a_job_that_ends_right_after_its_start_has_started(
    plan: LaunchPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pass_on(self: LaunchMonitor, path: Path, job: Job, num_bytes: int) -> int:
        finish(plan)
        return num_bytes

    monkeypatch.setattr(LaunchMonitor, "_pass_on", pass_on)
    assert follow(plan, Agent()) == ["start", "end", "done"]


def test_a_job_whose_agent_ends_right_after_its_result_is_done(plan: LaunchPlan) -> None:
    def end() -> int:
        finish(plan)
        return 0

    assert follow(plan, Agent(end)) == ["start", "end", "done"]
