"""Ranks as an editor's threads: which are there, what each was told to do, and what has become of that."""

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
    """One rank, or a thread of it that is stopped; `id` is the same as long as an editor is connected."""

    id: int
    target: Target
    why: str = ""  # it was last told to go on: "step", "breakpoint", "pause"; at its first stop ""
    under_way: tuple[Answer, int] | None = (
        None  # the command that the rank goes on by, and the request's number
    )
    is_announced: bool = False  # the editor knows that it is stopped

    @property
    def name(self) -> str:
        """Return what the editor shows."""
        place = ",".join(f"{axis}={at}" for axis, at in self.target.coordinates.items())
        return f"rank {self.target.label}" + (f" ({place})" if place else "")

    @property
    def is_stopped(self) -> bool:
        """Return whether it is at a prompt."""
        return self.under_way is None and self.target.state in ("stopped", "busy")

    @property
    def process(self) -> tuple[int, float | None]:
        """Return what tells the processes apart that this thread has been: a job may start a rank again."""
        return self.id, read_number(self.target.info, "pid")

    def go(self, line: str) -> None:
        """Begin a step, or let it run; `follow` says what comes of it. Raises LinkClosedError."""
        number = self.target.ask({"do": "line", "text": line, "command": True, "nested": False})
        self.under_way = (Answer(self.target), number)
        self.why = "breakpoint" if line in ("continue", "cont", "c") else "step"
        self.is_announced = False

    def pause(self) -> Frame:
        """Ask a rank that runs to stop at its next line, and return the answer."""
        self.why = "pause"
        armed = self.target.state == "armed"
        request = {"do": "stop", "reason": "pause"} if armed else {"do": "interrupt"}
        (answer,) = ask([self.target], request, _STATUS_SECONDS)
        return {"error": answer.failure} if answer.failure else answer.frame

    def follow(self) -> str:
        """Return what the command under way printed and came to, "" as long as it goes on."""
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
    """The ranks of one job, stopped or armed, under the numbers that the editor knows them by."""

    def __init__(self, registry: RankRegistry) -> None:
        self._registry = registry
        self._threads: dict[tuple[str, str], RankThread] = {}

    def __iter__(self) -> Iterator[RankThread]:
        """Yield those that can be reached, in the order of ranks."""
        yield from self._threads.values()

    def get(self, number: object) -> RankThread:
        """Return a thread by its number. Raises JobError when there is none."""
        for thread in self:
            if thread.id == number:
                return thread
        raise JobError(f"no rank is thread {number}: it runs on and is not armed, or it has ended")

    def refresh(self) -> list[RankThread]:
        """Look which ranks there are, and return those that have gone. Raises JobError for several jobs."""
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
        """Return rank + 1, as editors take 0 for none, or a number above all others."""
        taken = {thread.id for thread in (*self._threads.values(), *reached.values())}
        wanted = (target.number if target.number is not None else -1) + 1
        return wanted if wanted > 0 and wanted not in taken else max(taken | {10_000}) + 1
