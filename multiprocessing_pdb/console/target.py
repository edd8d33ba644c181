"""A stopped rank in the console. The types of all received fields are checked."""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from multiprocessing_pdb.console.link import Link, LinkClosedError
from multiprocessing_pdb.wire.framing import Frame


def read_text(frame: Frame, name: str) -> str:
    """Return a field as text, or an empty text if it is missing."""
    value = frame.get(name)
    return "" if value is None else value if isinstance(value, str) else repr(value)


def read_name(frame: Frame, name: str) -> str:
    """Return a field as text on one line: a name could otherwise forge lines of the console."""
    return " ".join(read_text(frame, name).split())


def read_number(frame: Frame, name: str) -> float | None:
    """Return a field as a number, or None if it is not one."""
    value = frame.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


# Results of commands that let the rank continue, with their texts.
ENDS = {"resumed": "runs on", "exited": "has exited", "ended": "has ended this thread"}


@dataclass
class Target:
    """One stopped rank: its link, its last status, and its unanswered requests."""

    link: Link
    label: str
    job: str
    info: Frame = field(default_factory=dict)
    late: deque[tuple[str, Frame]] = field(default_factory=deque)
    _numbers: Any = field(default_factory=lambda: count(1))
    _answers: dict[int, list[Frame]] = field(default_factory=dict)
    _overdue: dict[int, str] = field(default_factory=dict)

    @property
    def number(self) -> int | None:
        """The rank, or None for a process without one."""
        value = self.info.get("number")
        if value is None and self.label.isdecimal():
            return int(self.label)  # no status yet
        return value if isinstance(value, int) else None

    @property
    def coordinates(self) -> dict[str, int]:
        """The coordinate on each mesh axis."""
        value = self.info.get("coordinates")
        if not isinstance(value, dict):
            return {}
        return {str(axis): at for axis, at in value.items() if isinstance(at, int)}

    @property
    def place(self) -> str:
        """File and line, or an empty text if there are none."""
        line = read_number(self.info, "line")
        return f"{read_name(self.info, 'file')}:{line:.0f}" if line is not None else ""

    @property
    def state(self) -> str:
        """Return "stopped", "busy", "running" or "armed", or "left" once a command has resumed it."""
        return read_text(self.info, "state")

    def learn(self, frame: Frame) -> None:
        """Update the status from a status frame or the end of a command."""
        if "state" in frame:
            self.info = {key: value for key, value in frame.items() if key not in ("id", "out", "end")}
            self.job = read_name(frame, "job") or self.job
        elif read_text(frame, "end") in ENDS:
            self.info["state"] = "left"

    def ask(self, frame: Frame) -> int:
        """Send a request and return its number. Raises LinkClosedError."""
        number: int = next(self._numbers)
        self.link.send({**frame, "id": number})
        self._answers[number] = []
        return number

    def give_up(self, number: int, what: str) -> None:
        """Mark a request as overdue: its answer will be late."""
        self._answers.pop(number, None)
        self._overdue[number] = what

    def cancel(self, number: int) -> None:
        """Cancel a request whose answer is no longer needed."""
        with contextlib.suppress(LinkClosedError):
            self.link.send({"do": "cancel", "request": number})

    def take(self, number: int) -> list[Frame]:
        """Return the frames received for one request. The last one has no "part"."""
        self.sort()
        taken, self._answers[number] = self._answers.get(number, []), []
        if taken and "part" not in taken[-1]:
            del self._answers[number]
        return taken

    def sort(self) -> None:
        """Assign each received frame to its request. Answers to overdue requests are kept as late."""
        while self.link.inbox:
            frame = self.link.inbox.popleft()
            number = frame.get("id")
            if not isinstance(number, int):
                continue
            if number in self._answers:
                self._answers[number].append(frame)
            elif number in self._overdue and "part" not in frame:
                self.late.append((self._overdue.pop(number), frame))
