"""Registry of the stopped ranks of all sources, and choice of a job."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from multiprocessing_pdb.console.broadcast import ask
from multiprocessing_pdb.console.deaths import LastSeen
from multiprocessing_pdb.console.link import PEER_CLOSED, Link
from multiprocessing_pdb.console.source import Source
from multiprocessing_pdb.console.target import Target, read_name, read_number
from multiprocessing_pdb.wire.identity import FileOwner

_STATUS_SECONDS = 2.0
_POLL_SECONDS = 0.1


class JobError(ValueError):
    """No job matches, or more than one."""


class RankRegistry:
    """All stopped ranks of one job. If `job` is None, the only existing job is used."""

    def __init__(self, sources: Sequence[Source], job: str | None) -> None:
        self.sources = sources
        self.job = job
        self._targets: dict[bool, dict[int, Target]] = {False: {}, True: {}}  # key True: of armed processes
        self._links: dict[bool, dict[int, Link]] = {}  # keeps links alive, since their ids are keys
        self._last_seen = LastSeen()

    def refresh(self) -> list[Target]:
        """Return the stopped ranks of all jobs, in order."""
        return self._refresh(armed=False)

    def _refresh(self, *, armed: bool) -> list[Target]:
        """Return the stopped ranks, or armed processes, and update the status of those that may run."""
        self._begin("refresh", armed=armed)
        links = {stem: link for source in self.sources for stem, link in source.refresh(armed=armed).items()}
        known = {id(link): link for link in links.values()}
        targets = {key: target for key, target in self._targets[armed].items() if key in known}
        self._links[armed], self._targets[armed] = known, targets
        for stem, link in links.items():
            if id(link) not in targets:
                owner = FileOwner.parse(stem)
                targets[id(link)] = Target(link, owner.label, owner.job)
        unknown = [t for t in targets.values() if not t.info or t.state in ("running", "armed")]
        for answer in ask(unknown, {"do": "status"}, _STATUS_SECONDS):
            answer.target.label = read_name(answer.frame, "label") or answer.target.label
        # Leave out ranks that closed before their first answer, since they resumed. Show those with invalid
        # data.
        found = [
            t for t in targets.values() if t.state != "left" and (t.info or t.link.closed != PEER_CLOSED)
        ]
        return sorted(found, key=lambda t: (t.number is None, t.number or 0, t.label))

    def take_deaths(self) -> list[str]:
        """Return a line for each rank that has died since the last call, with its job if another is chosen.

        The first console that looks removes the files of a dead rank, so no other console would report it.
        """
        for target in [target for found in self._targets.values() for target in found.values()]:
            running = target.state in ("armed", "running")
            self._last_seen.note(target.info, target.place, is_running=running)
        self._begin("deaths")
        deaths = [death for source in self.sources for death in source.take_deaths()]
        return [self._last_seen.show(death, self.job) for death in deaths]

    def _begin(self, op: str, **fields: Any) -> None:
        """Start a request on all sources at once: hundreds of ranks can be on dozens of nodes."""
        for source in self.sources:
            source.begin(op, **fields)

    def list_armed(self) -> list[dict[str, Any]]:
        """Return the records of armed processes that are not stopped."""
        self._begin("armed")
        return [record for source in self.sources for record in source.list_armed()]

    def list_processes(self, job: str, action: str) -> list[dict[str, Any]]:
        """Return the processes of a job with the results of `action` ("list", "stacks", "kill", "arm")."""
        self._begin("processes", job=job, action=action)
        return [process for source in self.sources for process in source.list_processes(job, action)]

    def find_armed(self, job: str | None = None) -> list[Target]:
        """Return the armed processes of a job, or of the chosen one, without a stopped or stepped thread."""
        job = job or self.job
        stopped = {read_number(target.info, "pid") for target in self.refresh()}
        armed = self._refresh(armed=True)
        jobs = {target.job for target in armed} if job is None else {job}
        if len(jobs) > 1:
            raise JobError(
                f"ranks of {len(jobs)} jobs are armed: {', '.join(sorted(jobs))}; choose: job NAME"
            )
        return [t for t in armed if t.job in jobs and read_number(t.info, "pid") not in stopped]

    def find_jobs(self) -> dict[str, int]:
        """Return the number of stopped ranks by job."""
        jobs: dict[str, int] = {}
        for target in self.refresh():
            jobs[target.job] = jobs.get(target.job, 0) + 1
        return jobs

    def find(self) -> list[Target]:
        """Return the stopped ranks of the job.

        Raises JobError when several jobs have some and none is chosen.
        """
        targets = self.refresh()
        jobs = sorted({target.job for target in targets})
        if self.job is None and len(jobs) > 1:
            raise JobError(
                f"ranks of {len(jobs)} jobs are stopped: {', '.join(jobs)}; choose one with: job NAME"
            )
        return [target for target in targets if self.job in (None, target.job)]

    def find_job(self) -> str:
        """Return the name of the job. Raises JobError when there is none."""
        if self.job is not None:
            return self.job
        targets = self.find()
        if not targets:
            raise JobError("no rank is stopped; name the job with: job NAME")
        return targets[0].job

    def find_next_stop(self, gone: Target) -> Target | None:
        """Return the target of the same rank at another stop, or None."""
        for target in self.refresh():
            if target.label == gone.label and target.job == gone.job and target.link is not gone.link:
                return target
        return None

    def await_count(self, wanted: int, seconds: float) -> list[Target]:
        """Return the stopped ranks once there are `wanted`, or fewer after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            found = [target for target in self.find() if target.state != "running"]
            if len(found) >= wanted or time.monotonic() > deadline:
                return found
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Close all sources. The ranks' state does not change."""
        for source in self.sources:
            source.close()
