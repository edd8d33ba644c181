"""Ranks as an editor's threads: the known ranks, the last command of each, and its outcome."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from multiprocessing_pdb.console.broadcast import Answer, ask, collect
from multiprocessing_pdb.console.registry import JobError, RankRegistry
from multiprocessing_pdb.console.target import Target, read_number, read_text
from multiprocessing_pdb.wire.framing import Frame

_STATUS_SECONDS = 2.0


@dataclass
class RankThread:
    """One rank, or a stopped thread of it. `id` is constant while an editor is connected."""

    id: int
    target: Target
    why: str = ""  # why it was last resumed: "step", "breakpoint", "pause", or "" at the first stop
    under_way: tuple[Answer, int] | None = (
        None  # the command that resumed the rank, and the number of its request
    )
    is_announced: bool = False  # the editor knows that it is stopped

    @property
    def name(self) -> str:
        """Return the name that the editor shows."""
        place = ",".join(f"{axis}={at}" for axis, at in self.target.coordinates.items())
        return f"rank {self.target.label}" + (f" ({place})" if place else "")

    @property
    def is_stopped(self) -> bool:
        """Return whether the rank is at a prompt."""
        return self.under_way is None and self.target.state in ("stopped", "busy")

    @property
    def process(self) -> tuple[int, float | None]:
        """Return a key of the process behind this thread, since a job may restart a rank."""
        return self.id, read_number(self.target.info, "pid")

    def go(self, line: str) -> None:
        """Start a step, or continue. `follow` returns the outcome. Raises LinkClosedError."""
        number = self.target.ask({"do": "line", "text": line, "command": True, "nested": False})
        self.under_way = (Answer(self.target), number)
        self.why = "breakpoint" if line in ("continue", "cont", "c") else "step"
        self.is_announced = False

    def pause(self) -> Frame:
        """Request that a running rank stop at its next line, and return the answer."""
        self.why = "pause"
        armed = self.target.state == "armed"
        request = {"do": "stop", "reason": "pause"} if armed else {"do": "interrupt"}
        (answer,) = ask([self.target], request, _STATUS_SECONDS)
        return {"error": answer.failure} if answer.failure else answer.frame

    def follow(self) -> str:
        """Return the outcome of the command under way, or "" while it runs."""
        if self.under_way is None:
            return ""
        answer, number = self.under_way
        if not collect(answer, number, None):
            return ""
        self.under_way = None
        if answer.failure:
            return "failed" if not self.target.link.closed else "gone"
        return "stopped" if read_text(answer.frame, "end") == "ready" else "gone"


class RankThreads:
    """The stopped or armed ranks of one job, by the ids that the editor uses."""

    def __init__(self, registry: RankRegistry) -> None:
        self._registry = registry
        self._threads: dict[tuple[str, str], RankThread] = {}

    def __iter__(self) -> Iterator[RankThread]:
        """Yield the reachable ranks, in order."""
        yield from self._threads.values()

    def get(self, number: object) -> RankThread:
        """Return a thread by its id. Raises JobError when there is none."""
        for thread in self:
            if thread.id == number:
                return thread
        raise JobError(f"no rank is thread {number}: it runs on and is not armed, or it has ended")

    def refresh(self) -> list[RankThread]:
        """Update the ranks, and return those that are gone. Raises JobError for several jobs."""
        found = [*self._registry.find(), *self._registry.find_armed()]
        reached: dict[tuple[str, str], RankThread] = {}
        for target in found:
            key = (target.job, target.label)
            known = self._threads.get(key) or reached.get(key)
            if known is None:
                known = RankThread(self._choose_number(target, reached), target)
            elif known.target.link is not target.link:
                known.target, known.under_way, known.is_announced = target, None, False
                known.why = "pause" if known.why == "pause" else ""
            reached[key] = known
        gone = [thread for key, thread in self._threads.items() if key not in reached]
        self._threads = reached
        return gone

    def _choose_number(self, target: Target, reached: dict[tuple[str, str], RankThread]) -> int:
        """Return rank + 1, since editors treat 0 as none, or an id above all others."""
        taken = {thread.id for thread in (*self._threads.values(), *reached.values())}
        wanted = (target.number if target.number is not None else -1) + 1
        return wanted if wanted > 0 and wanted not in taken else max(taken | {10_000}) + 1
