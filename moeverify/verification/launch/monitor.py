"""Monitor of one launch: starts its agent, waits for each job, and ends processes that do not exit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from moeverify.results.failure import FailureCause, JobFailure, Phase, ProcessState
from moeverify.results.run import RankReport
from moeverify.verification.launch.clock import ActiveClock, ProcessTree
from moeverify.verification.launch.evidence import (
    Death,
    collect_reports,
    has_ended,
    read_death,
    read_frozen,
    read_pid,
    read_tail,
)
from moeverify.verification.launch.plan import (
    CLOCK_FILE,
    USED_UP_FILE,
    Job,
    JobOutcome,
    LaunchEvent,
    LaunchPlan,
)
from moeverify.verification.launch.tracebacks import find_place

_POLL = 0.01
# All limits are in seconds of the launch's clock, which hardly advances while its ranks wait for a processor.
START_LIMIT = 180.0
"""Time until all ranks of a launch must be up. Units: seconds."""
_GAP_LIMIT = 60.0
_HANG_SLACK = 9.0
_STOP_GRACE = 2.0
_END_GRACE = 10.0
_DUMP_GRACE = 0.5
_LOST_GRACE = 3.0
_LOOK = 0.5


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
    job and another launch might succeed. `start_limit` raises the time until the ranks must begin a job.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        launch: int,
        on_event: Callable[[LaunchEvent], None],
        start: StartAgent = start_agent,
        *,
        start_limit: float = 0.0,
    ) -> None:
        self.num_over = 0
        self.worth_retrying = False
        self._plan = plan
        self._launch = launch
        self._on_event = on_event
        self._start_agent = start
        self._start_limit = start_limit
        self._processes = ProcessTree()
        self._clock: ActiveClock
        self._not_counted = 0.0  # time that the clock had not counted when the current limit began
        self._agent: Agent | None = None
        self._up = False
        self._looked = self._whole = 0.0  # when the ranks were last looked at, and when all of them ran
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
                if (self._plan.launch_folder / USED_UP_FILE).exists():
                    self._await_end()
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
        self._clock = ActiveClock(self._processes.measure, folder / CLOCK_FILE)
        with (folder / "agent.log").open("wb") as log:
            self._agent = self._start_agent(plan_path, log)
        self._processes.root = self._agent.pid

    def _await_job(self, position: int, job: Job) -> JobOutcome | None:
        """Return the outcome of a job, or None if the launch ended before the job began."""
        assert self._agent is not None
        folder = self._plan.job_folder(position)
        num_bytes = 0
        began = None
        limit = self._begin_limit(self._limit_start(position))
        while True:
            self._notice_up()
            # In the reverse order of events: the end of the agent, the result, the start of the job.
            ended = self._agent.poll() is not None
            result = _read_result(folder / "result.json")
            if began is None and folder.is_dir() and any(folder.glob("rank-*.started")):
                began = time.monotonic()
                limit = self._begin_limit(job.timeout + job.grace + _HANG_SLACK)
                self._on_event(LaunchEvent(kind="start", job=job.name, num_ranks=job.num_ranks))
            num_bytes = self._pass_on(folder / "events", job, num_bytes)
            if result is not None:
                return JobOutcome(
                    job=job.name,
                    index=self._plan.first + position,
                    state="done",
                    launch=self._launch,
                    **result,
                )
            is_lost = began is not None and self._has_lost_rank(job.num_ranks)
            if ended or is_lost or self._clock.read() > limit:
                if not (ended or is_lost):
                    self._force_stacks(job.num_ranks if began is not None else self._plan.num_ranks)
                break
            time.sleep(_POLL)
        self._stop()
        if began is not None:
            seconds = time.monotonic() - began
            return self._describe_failure(position, job, folder, seconds, is_over_time=not (ended or is_lost))
        self._note_loss(position, forced=not ended)
        return None

    def _has_lost_rank(self, num_ranks: int) -> bool:
        """Return whether a rank of the current job ended some time ago.

        All ranks of a job end it together, and rank 0 writes the result at once. Elastic takes exit status 0
        for success, and the other ranks may wait for that rank without a timeout of their own.
        """
        now = self._clock.read()
        if now < self._looked + _LOOK:
            return False
        self._looked = now
        pids = [read_pid(self._plan.launch_folder, rank) for rank in range(num_ranks)]
        if not any(pid is not None and has_ended(pid) for pid in pids):
            self._whole = now
        return now > self._whole + _LOST_GRACE

    def _await_end(self) -> None:
        assert self._agent is not None
        self._clock.sleep(_END_GRACE, until=self._has_ended)

    def _begin_limit(self, seconds: float) -> float:
        """Return the time of the clock at which a limit that begins now is over."""
        end = self._clock.read() + seconds
        self._not_counted = self._clock.not_counted
        return end

    def _limit_start(self, position: int) -> float:
        """Return the time until the ranks must begin the job at `position` of this launch. Units: seconds."""
        return max(self._start_limit, _GAP_LIMIT if position else START_LIMIT)

    def _has_ended(self) -> bool:
        return self._agent is None or self._agent.poll() is not None

    def _describe_failure(
        self, position: int, job: Job, folder: Path, seconds: float, *, is_over_time: bool
    ) -> JobOutcome:
        death = self._read_death()
        ranks = list(range(job.num_ranks))
        if death.first is not None and death.first not in ranks:
            # This rank was waiting for a later job, and its end also ended this job.
            ranks.append(death.first)
        origin = collect_reports(self._plan.launch_folder, folder, ranks, death)
        if origin.is_hang or is_over_time:
            cause = FailureCause.OVER_TIME if origin.is_hang else FailureCause.UNREPORTED
            machine = self._clock.describe_machine(self._not_counted)
            failure = origin.make_failure(cause, timeout=job.timeout, machine=machine)
        elif not death.exits:
            failure = origin.make_failure(
                FailureCause.LAUNCHER, launcher_status=death.agent, launcher_error=death.error
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
        # An exception would be raised again. A signal, a port taken by another process or a rank that did not
        # come up in time might not recur.
        self.worth_retrying = forced or all(status < 0 for status in self._death.exits.values())
        if position:
            failure, _ = self._describe_loss("between two jobs")
            self._on_event(LaunchEvent(kind="lost", failure=failure))

    def _describe_loss(self, phase: Phase) -> tuple[JobFailure, tuple[RankReport, ...]]:
        """Return why the launch ended outside of a job, and the reports of its ranks."""
        death, folder = self._death, self._plan.launch_folder
        origin = collect_reports(folder, None, range(self._plan.num_ranks), death)
        if self._was_forced:
            stacks = {report.rank: report.stack for report in origin.reports}
            failure = origin.make_failure(
                FailureCause.NOT_IN_TIME,
                phase=phase,
                not_up={rank: find_place(stacks[rank]) for rank in self._list_not_up()},
                timeout=self._limit_start(self.num_over),
                machine=self._clock.describe_machine(self._not_counted),
            )
        elif death.error or not death.exits:
            error = death.error or read_tail(folder / "agent.log")
            failure = origin.make_failure(
                FailureCause.LAUNCHER, phase=phase, launcher_status=death.agent, launcher_error=error
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
            pid = read_pid(self._plan.launch_folder, rank)
            if pid is None:
                continue
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGUSR1)
                state = read_frozen(pid)
                if state is not None:
                    self._frozen[rank] = state
        self._clock.sleep(_DUMP_GRACE)

    def _stop(self) -> None:
        """End the agent and its ranks: SIGTERM to the agent first, then SIGKILL to its process group."""
        agent = self._agent
        if agent is None:
            return
        if agent.poll() is None:
            agent.terminate()
            if not self._clock.sleep(_STOP_GRACE, until=self._has_ended):
                # The ranks are in the agent's process group, so this reaches every rank.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()
        self._clock.close()


def _read_result(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except OSError:
        return None
    return content
