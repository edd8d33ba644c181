"""Follows one launch from outside: starts its agent, awaits each job, ends what does not end by itself."""

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
from typing import Any

from moeverify.launch.evidence import Death, collect_reports, describe_exit, read_death, read_tail
from moeverify.launch.plan import Job, JobOutcome, LaunchEvent, Plan

_POLL = 0.01
_START_LIMIT = 180.0
_GAP_LIMIT = 60.0
_HANG_SLACK = 9.0
_STOP_GRACE = 2.0
_FROZEN = {
    "T": "over its time: its process is stopped (SIGSTOP)",
    "t": "over its time: a debugger holds its process",
    "D": "over its time: its process is inside a system call that cannot be interrupted (a disk or a device)",
}


class Follower:
    """One launch, seen from the process that asked for it.

    `num_over` counts the jobs whose outcome is known; `worth_retrying` says whether another launch might get
    further where this one did not begin its first job.
    """

    def __init__(self, plan: Plan, launch: int, tell: Callable[[LaunchEvent], None]) -> None:
        self.num_over = 0
        self.worth_retrying = False
        self._plan = plan
        self._launch = launch
        self._tell = tell
        self._agent: subprocess.Popen[bytes] | None = None
        self._up = False
        self._why = ""
        self._death = Death()
        self._frozen: dict[int, str] = {}

    def follow(self) -> Iterator[JobOutcome]:
        """Yield the outcome of each job until the jobs or the launch are over; then nothing of it runs."""
        self._tell(LaunchEvent(kind="launch", num_ranks=self._plan.num_ranks, detail=str(self._launch)))
        try:
            self._start()
            for position, job in enumerate(self._plan.jobs):
                outcome = self._await_job(position, job)
                if outcome is None:
                    break
                self.num_over += 1
                self._tell(LaunchEvent(kind="end", job=job.name, num_ranks=job.num_ranks, outcome=outcome))
                yield outcome
                if outcome.state != "done":
                    break
            else:
                self._await_end()
        finally:
            self._stop()

    def give_up(self) -> Iterator[JobOutcome]:
        """Yield an outcome for each job that this launch, which never began one, leaves undone."""
        summary, reports = collect_reports(
            self._plan.launch_folder, None, range(self._plan.num_ranks), self._death
        )
        for position, job in enumerate(self._plan.jobs):
            yield JobOutcome(
                job=job.name,
                index=self._plan.first + position,
                state="unstarted",
                summary=f"the launch failed before its first job: {self._why or summary}",
                rank_reports=reports,
                launch=self._launch,
            )

    def _start(self) -> None:
        folder = self._plan.launch_folder
        folder.mkdir(parents=True)
        plan_path = folder / "plan.json"
        self._plan.write(plan_path)
        command = [sys.executable, "-m", "moeverify.launch.agent", str(plan_path), str(os.getpid())]
        with (folder / "agent.log").open("wb") as log:
            # A session of its own: Ctrl-C reaches this process alone, which then ends the ranks in order.
            self._agent = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _await_job(self, position: int, job: Job) -> JobOutcome | None:
        """Return the outcome of a job, or None when the launch ended before it began."""
        assert self._agent is not None
        folder = self._plan.job_folder(position)
        told = 0
        began = None
        limit = time.monotonic() + (_GAP_LIMIT if position else _START_LIMIT)
        while True:
            self._notice_up()
            ended = self._agent.poll() is not None
            if began is None and folder.is_dir() and any(folder.glob("rank-*.started")):
                began = time.monotonic()
                limit = began + job.timeout + _HANG_SLACK
                self._tell(LaunchEvent(kind="start", job=job.name, num_ranks=job.num_ranks))
            told = self._pass_on(folder / "events", job, told)
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
            ranks.append(death.first)  # It waited for a later job, and its end was the end of this one.
        summary, reports = collect_reports(self._plan.launch_folder, folder, ranks, death)
        first = reports[0].rank
        if first >= job.num_ranks:
            summary = summary.replace(f"rank {first}", f"rank {first}, which only waited,", 1)
        hung = any(report.state == "hung" for report in reports)
        if not hung and seconds > job.timeout + _HANG_SLACK:
            hung, summary = True, f"over its {job.timeout:g} s, and its ranks did not report: {summary}"
        elif hung:
            summary = f"over its {job.timeout:g} s: {summary}"
        elif not death.exits:
            summary = f"the launcher's process {describe_exit(death.agent)}; {death.error or summary}"
        return JobOutcome(
            job=job.name,
            index=self._plan.first + position,
            state="hung" if hung else "failed",
            summary=summary,
            rank_reports=reports,
            seconds=seconds,
            launch=self._launch,
        )

    def _note_loss(self, position: int, forced: bool) -> None:
        self._death = death = self._read_death()
        if forced:
            self._why = "the ranks did not come up in time"
        elif death.error:
            self._why = death.error
        elif not death.exits:
            tail = read_tail(self._plan.launch_folder / "agent.log")
            self._why = f"the launcher's process {describe_exit(death.agent)}\n{tail}".strip()
        # An exception would come again; a signal or a port taken by another might not.
        self.worth_retrying = not forced and all(status < 0 for status in death.exits.values())
        if position:
            summary, _ = collect_reports(self._plan.launch_folder, None, range(self._plan.num_ranks), death)
            self._tell(LaunchEvent(kind="lost", detail=f"between two jobs: {self._why or summary}"))

    def _read_death(self) -> Death:
        status = self._agent.poll() if self._agent is not None else None
        return read_death(self._plan.launch_folder, status, self._frozen)

    def _notice_up(self) -> None:
        if self._up:
            return
        folder = self._plan.launch_folder
        self._up = all((folder / f"rank-{rank}.json").exists() for rank in range(self._plan.num_ranks))
        if self._up:
            self._tell(LaunchEvent(kind="up", num_ranks=self._plan.num_ranks))

    def _pass_on(self, path: Path, job: Job, told: int) -> int:
        """Tell the whole lines of rank 0 from byte `told` on, and return how far that was."""
        try:
            with path.open("rb") as file:
                file.seek(told)
                text = file.read()
        except OSError:
            return told
        whole = text[: text.rfind(b"\n") + 1]
        for line in whole.splitlines():
            self._tell(
                LaunchEvent(kind="report", job=job.name, num_ranks=job.num_ranks, detail=json.loads(line))
            )
        return told + len(whole)

    def _force_stacks(self, num_ranks: int) -> None:
        """Ask the ranks for their stacks, and see which cannot answer: the last thing before the kill."""
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
        """End the agent and its ranks: first by a signal that lets the agent bury them, then by force."""
        agent = self._agent
        if agent is None or agent.poll() is not None:
            return
        agent.terminate()
        try:
            agent.wait(_STOP_GRACE)
        except subprocess.TimeoutExpired:
            # The ranks are in the agent's process group, so that none can hide.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()


def _read_result(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except OSError:
        return None
    return content
