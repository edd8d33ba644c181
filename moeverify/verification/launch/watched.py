"""The watcher's side of a script: who waits where, when a collective lasts and when the script ends. No torch.

The ranks write the files that `moeverify.verification.launch.watched_rank` describes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moeverify.results.failure import JobFailure
from moeverify.verification.collectives.flight_recorder import read_flight
from moeverify.verification.collectives.hang import find_open
from moeverify.verification.launch.clock import ActiveClock, ProcessTree
from moeverify.verification.launch.evidence import Death, collect_reports, read_frozen

END_FOLDER = "end"
GUEST_SIGNAL = signal.SIGRTMAX - 2
"""The signal on which a rank dumps its stacks if it cannot answer. Scripts hardly use it themselves."""

_ANSWER_LIMIT = 5.0
_DUMP_LIMIT = 0.5


def find_state_folder(folder: Path, number: int) -> Path:
    """Return the folder whose creation asks the ranks for their state, the `number`-th time from 0."""
    return folder / f"state-{number}"


@dataclass
class _LastRead:
    """The file of a rank's collectives as last read, and the time of its last change."""

    content: bytes
    since: float
    not_counted: float  # by the clock, until then
    reported: int = 0  # number of the pending collective that was reported


class WatchedRanks:
    """The ranks of a script on this machine, by the files in `folder`.

    A rank stands in a collective if it began none and ended none for `limit` seconds of the clock of the
    `processes`, and one is pending.
    """

    def __init__(self, folder: Path, limit: float) -> None:
        self.processes = ProcessTree()
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._limit = limit
        self._clock = ActiveClock(self.processes.measure)
        self._seen: dict[int, _LastRead] = {}
        self._num_asked = 0

    def look(self) -> JobFailure | None:
        """Return who waits for whom if a rank stands in a collective, once for each such collective."""
        now = self._clock.read()
        for rank, path in self._list_flights().items():
            content = _read_bytes(path)
            seen = self._seen.get(rank)
            if seen is None or seen.content != content:
                self._seen[rank] = _LastRead(content, now, self._clock.not_counted)
        stands = [
            rank
            for rank, seen in self._seen.items()
            if now - seen.since >= self._limit and self._find_open(rank) not in (0, seen.reported)
        ]
        if not stands:
            return None
        failure = self._ask(min(self._seen[rank].not_counted for rank in stands))
        for rank, seen in self._seen.items():
            seen.reported = self._find_open(rank)
        # The ranks may have gone on meanwhile.
        return failure if failure.hang is not None and failure.hang.waits else None

    def end(self) -> JobFailure | None:
        """Return how the ranks ended and who waited for whom, or None if no process became a rank."""
        ranks = sorted(self._list_flights())
        return self._collect(self._folder / END_FOLDER, ranks) if ranks else None

    def _ask(self, not_counted: float) -> JobFailure:
        """Ask all ranks for their state, and return who waits for whom.

        `not_counted` is the time that the clock had not counted when the first of them began to wait.
        """
        folder = find_state_folder(self._folder, self._num_asked)
        ranks = sorted(self._seen)
        alive = [rank for rank in ranks if self._is_alive(rank)]
        folder.mkdir()
        self._num_asked += 1
        for rank in set(ranks) - set(alive):
            with suppress(OSError):  # it was killed, or has left no word
                shutil.copy(self._folder / END_FOLDER / f"rank-{rank}.json", folder)
        paths = {rank: folder / f"rank-{rank}.json" for rank in alive}
        if not self._clock.sleep(_ANSWER_LIMIT, until=lambda: all(path.exists() for path in paths.values())):
            for rank, path in paths.items():
                pid = self._find_pid(rank)
                if not path.exists() and _catches(pid, GUEST_SIGNAL):
                    with suppress(OSError):
                        os.kill(pid, GUEST_SIGNAL)
            self._clock.sleep(_DUMP_LIMIT)
        return self._collect(folder, ranks, not_counted)

    def _collect(self, folder: Path, ranks: list[int], not_counted: float = 0.0) -> JobFailure:
        gone = [rank for rank in ranks if not self._is_alive(rank)]
        frozen = {rank: state for rank in ranks if (state := read_frozen(self._find_pid(rank))) is not None}
        origin = collect_reports(
            self._folder, folder, ranks, Death(frozen=frozen, gone=gone), is_watched=True
        )
        return origin.make_failure(timeout=self._limit, machine=self._clock.describe_machine(not_counted))

    def _list_flights(self) -> dict[int, Path]:
        return {int(path.stem.removeprefix("rank-")): path for path in self._folder.glob("rank-*.flight")}

    def _find_open(self, rank: int) -> int:
        """Return the number of the pending collective of a rank, or 0."""
        record = find_open(read_flight(self._folder / f"rank-{rank}.flight"))
        return 0 if record is None else record.number

    def _find_pid(self, rank: int) -> int:
        with suppress(OSError, ValueError, KeyError):
            return int(json.loads((self._folder / f"rank-{rank}.json").read_text())["pid"])
        return 0

    def _is_alive(self, rank: int) -> bool:
        pid = self._find_pid(rank)
        try:
            os.kill(pid, 0)
        except OSError:
            return False
        return pid > 0


def _catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal, which ends it otherwise."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    found = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> (number - 1) & 1)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # a new process of this rank is about to replace it
        return b""
