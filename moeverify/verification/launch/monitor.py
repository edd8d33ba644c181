"""Monitor of one launch: starts its agent, waits for each job, and ends processes that do not exit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from moeverify.results.failure import Cause, JobFailure, Phase, ProcessState
from moeverify.results.run import RankReport
from moeverify.verification.launch.evidence import Death, collect_reports, read_death, read_tail
from moeverify.verification.launch.plan import Job, JobOutcome, LaunchEvent, Plan
from moeverify.verification.launch.stack import find_place

_POLL = 0.01
START_LIMIT = 180.0
"""Seconds until all ranks of a launch must be up."""
_GAP_LIMIT = 60.0
_HANG_SLACK = 9.0
_STOP_GRACE = 2.0
# States of a process that cannot respond, by their letter in /proc/PID/stat; see proc(5).
_FROZEN: Mapping[str, ProcessState] = {"T": "stopped", "t": "traced", "D": "uninterruptible"}


class Agent(Protocol):
    """Interface of the process that starts the ranks of a launch: a subset of `subprocess.Popen`.

    The process must lead its own process group.
    """

    pid: int

    def poll(self) -> int | None:
        """Return the exit status, or None while the agent runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status. Raises: subprocess.TimeoutExpired when the agent still runs."""

    def terminate(self) -> None:
        """Send SIGTERM."""


StartAgent = Callable[[Path, BinaryIO], Agent]
"""Function that starts the agent of the plan in a file and sends its output to a log file."""


def agent_command() -> list[str]:
    """Return the command that starts an agent, without the plan path and the parent process id."""
    return [sys.executable, "-m", "moeverify.verification.launch.agent"]


def start_agent(plan: Path, log: BinaryIO) -> Agent:
    """Start the agent of a plan as a separate process."""
    # With its own session, Ctrl-C reaches only this process, which then ends the ranks in order.
    return subprocess.Popen(
        [*agent_command(), str(plan), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


class LaunchMonitor:
    """One launch, seen from the controller.

    `num_over` is the number of jobs with a known outcome. `worth_retrying` is true if this launch began no
    job and another launch might succeed.
    """

    def __init__(
        self,
        plan: Plan,
        launch: int,
        on_event: Callable[[LaunchEvent], None],
        start: StartAgent = start_agent,
    ) -> None:
        self.num_over = 0
        self.worth_retrying = False
        self._plan = plan
        self._launch = launch
        self._on_event = on_event
        self._start_agent = start
        self._agent: Agent | None = None
        self._up = False
        self._death = Death()
        self._was_forced = False
        self._frozen: dict[int, ProcessState] = {}

    def follow(self) -> Iterator[JobOutcome]:
        """Yield the outcome of each job until the jobs or the launch end.

        No process of the launch runs afterwards.
        """
        self._on_event(LaunchEvent(kind="launch", num_ranks=self._plan.num_ranks, detail=str(self._launch)))
        try:
            self._start()
            for position, job in enumerate(self._plan.jobs):
                outcome = self._await_job(position, job)
                if outcome is None:
                    break
                self.num_over += 1
                self._on_event(
                    LaunchEvent(kind="end", job=job.name, num_ranks=job.num_ranks, outcome=outcome)
                )
                yield outcome
                if outcome.state != "done":
                    break
            else:
                self._await_end()
        finally:
            self._stop()

    def give_up(self) -> Iterator[JobOutcome]:
        """Yield an `unstarted` outcome for each job. Call it only if this launch began none."""
        failure, reports = self._describe_loss("before its first job")
        for position, job in enumerate(self._plan.jobs):
            yield JobOutcome(
                job=job.name,
                index=self._plan.first + position,
                state="unstarted",
                failure=failure,
                rank_reports=reports,
                launch=self._launch,
            )

    def _start(self) -> None:
        folder = self._plan.launch_folder
        folder.mkdir(parents=True)
        plan_path = folder / "plan.json"
        self._plan.write(plan_path)
        with (folder / "agent.log").open("wb") as log:
            self._agent = self._start_agent(plan_path, log)

    def _await_job(self, position: int, job: Job) -> JobOutcome | None:
        """Return the outcome of a job, or None if the launch ended before the job began."""
        assert self._agent is not None
        folder = self._plan.job_folder(position)
        num_bytes = 0
        began = None
        limit = time.monotonic() + (_GAP_LIMIT if position else START_LIMIT)
        while True:
            self._notice_up()
            ended = self._agent.poll() is not None
            if began is None and folder.is_dir() and any(folder.glob("rank-*.started")):
                began = time.monotonic()
                limit = began + job.timeout + job.grace + _HANG_SLACK
                self._on_event(LaunchEvent(kind="start", job=job.name, num_ranks=job.num_ranks))
            num_bytes = self._pass_on(folder / "events", job, num_bytes)
            result = _read_result(folder / "result.json")
            if result is not None:
                return JobOutcome(
                    job=job.name,
                    index=self._plan.first + position,
                    state="done",
                    launch=self._launch,
                    **result,
                )
            if ended or time.monotonic() > limit:
                if not ended:
                    self._force_stacks(job.num_ranks if began is not None else self._plan.num_ranks)
                break
            time.sleep(_POLL)
        self._stop()
        if began is not None:
            return self._describe_failure(position, job, folder, time.monotonic() - began)
        self._note_loss(position, forced=not ended)
        return None

    def _await_end(self) -> None:
        assert self._agent is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._agent.wait(timeout=10.0)

    def _describe_failure(self, position: int, job: Job, folder: Path, seconds: float) -> JobOutcome:
        death = self._read_death()
        ranks = list(range(job.num_ranks))
        if death.first is not None and death.first not in ranks:
            # This rank was waiting for a later job, and its end also ended this job.
            ranks.append(death.first)
        origin = collect_reports(self._plan.launch_folder, folder, ranks, death)
        is_over_time = seconds > job.timeout + _HANG_SLACK
        if origin.is_hang:
            failure = origin.make_failure(Cause.OVER_TIME, timeout=job.timeout)
        elif is_over_time:
            failure = origin.make_failure(Cause.UNREPORTED, timeout=job.timeout)
        elif not death.exits:
            failure = origin.make_failure(
                Cause.LAUNCHER, launcher_status=death.agent, launcher_error=death.error
            )
        else:
            failure = origin.make_failure()
        only_waited = origin.reports[0].rank >= job.num_ranks
        return JobOutcome(
            job=job.name,
            index=self._plan.first + position,
            state="hung" if origin.is_hang or is_over_time else "failed",
            failure=failure.model_copy(update={"only_waited": only_waited}),
            rank_reports=origin.reports,
            seconds=seconds,
            launch=self._launch,
        )

    def _note_loss(self, position: int, forced: bool) -> None:
        self._death, self._was_forced = self._read_death(), forced
        # An exception would be raised again. A signal, a port taken by another process or one missing rank
        # might not recur.
        if forced:
            self.worth_retrying = 0 < len(self._list_not_up()) < self._plan.num_ranks
        else:
            self.worth_retrying = all(status < 0 for status in self._death.exits.values())
        if position:
            failure, _ = self._describe_loss("between two jobs")
            self._on_event(LaunchEvent(kind="lost", failure=failure))

    def _describe_loss(self, phase: Phase) -> tuple[JobFailure, tuple[RankReport, ...]]:
        """Return why the launch ended outside of a job, and the reports of its ranks."""
        death, folder = self._death, self._plan.launch_folder
        origin = collect_reports(folder, None, range(self._plan.num_ranks), death)
        if self._was_forced:
            stacks = {report.rank: report.stack for report in origin.reports}
            not_up = {rank: find_place(stacks[rank]) for rank in self._list_not_up()}
            failure = origin.make_failure(Cause.NOT_IN_TIME, phase=phase, not_up=not_up)
        elif death.error or not death.exits:
            error = death.error or read_tail(folder / "agent.log")
            failure = origin.make_failure(
                Cause.LAUNCHER, phase=phase, launcher_status=death.agent, launcher_error=error
            )
        else:
            failure = origin.make_failure(phase=phase)
        return failure, origin.reports

    def _read_death(self) -> Death:
        status = self._agent.poll() if self._agent is not None else None
        return read_death(self._plan.launch_folder, status, self._frozen)

    def _notice_up(self) -> None:
        if self._up:
            return
        self._up = not self._list_not_up()
        if self._up:
            self._on_event(LaunchEvent(kind="up", num_ranks=self._plan.num_ranks))

    def _list_not_up(self) -> list[int]:
        folder = self._plan.launch_folder
        return [rank for rank in range(self._plan.num_ranks) if not (folder / f"rank-{rank}.up").exists()]

    def _pass_on(self, path: Path, job: Job, start: int) -> int:
        """Pass on the complete lines of rank 0 from byte `start` on; return the offset of their end."""
        try:
            with path.open("rb") as file:
                file.seek(start)
                text = file.read()
        except OSError:
            return start
        whole = text[: text.rfind(b"\n") + 1]
        for line in whole.splitlines():
            self._on_event(
                LaunchEvent(kind="report", job=job.name, num_ranks=job.num_ranks, detail=json.loads(line))
            )
        return start + len(whole)

    def _force_stacks(self, num_ranks: int) -> None:
        """Request the stacks of the ranks, and record the ranks that cannot respond.

        Called just before the kill.
        """
        for rank in range(num_ranks):
            with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
                path = self._plan.launch_folder / f"rank-{rank}.json"
                pid = int(json.loads(path.read_text())["pid"])
                os.kill(pid, signal.SIGUSR1)
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                if state in _FROZEN:
                    self._frozen[rank] = _FROZEN[state]
        time.sleep(0.5)

    def _stop(self) -> None:
        """End the agent and its ranks: SIGTERM to the agent first, then SIGKILL to its process group."""
        agent = self._agent
        if agent is None or agent.poll() is not None:
            return
        agent.terminate()
        try:
            agent.wait(_STOP_GRACE)
        except subprocess.TimeoutExpired:
            # The ranks are in the agent's process group, so this reaches every rank.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()


def _read_result(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except OSError:
        return None
    return content
