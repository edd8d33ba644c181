"""A stopped rank as the console knows it; nothing it sends is believed to have the right type."""

from __future__ import annotations

import contextlib
import re
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from multiprocessing_pdb.console.link import Link, LinkClosedError
from multiprocessing_pdb.wire.framing import Frame

# Colours and pdbpp's "clear the screen" may pass; other sequences could forge what the terminal shows.
_ALLOWED = re.compile(r"\x1b\[[0-9;]*m|\x1b\[2J|\x1b\[1;1H")
_SCREEN = re.compile(r"\x1b\[2J|\x1b\[1;1H")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def clean(text: object) -> str:
    """Return text that is safe to print."""
    kept: list[str] = []
    at = 0
    raw = text if isinstance(text, str) else repr(text)
    for match in _ALLOWED.finditer(raw):
        kept += [_CONTROL.sub("?", raw[at : match.start()]), match.group()]
        at = match.end()
    return "".join([*kept, _CONTROL.sub("?", raw[at:])])


def drop_screen_control(text: str) -> str:
    """Return text without pdbpp's "clear the screen", for where it is shown among other ranks'."""
    return _SCREEN.sub("", text)


def read_text(frame: Frame, name: str) -> str:
    """Return a field as printable text, empty where it is absent."""
    value = frame.get(name)
    return "" if value is None else clean(value)


def read_number(frame: Frame, name: str) -> float | None:
    """Return a field as a number, None where it is none."""
    value = frame.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


# How a command ends that lets the rank run on, and what is said of it.
ENDS = {"resumed": "runs on", "exited": "has exited", "ended": "has ended this thread"}


@dataclass
class Target:
    """One stopped rank: its link, what it last said of itself, and requests that it has not answered yet."""

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
        """The rank, None for a process that has none."""
        value = self.info.get("number")
        if value is None and self.label.isdecimal():
            return int(self.label)  # it has not said anything yet
        return value if isinstance(value, int) else None

    @property
    def coordinates(self) -> dict[str, int]:
        """The place on each mesh axis."""
        value = self.info.get("coordinates")
        if not isinstance(value, dict):
            return {}
        return {clean(axis): at for axis, at in value.items() if isinstance(at, int)}

    @property
    def place(self) -> str:
        """File and line, or what it does instead of standing at one."""
        line = read_number(self.info, "line")
        return f"{read_text(self.info, 'file')}:{line:.0f}" if line is not None else ""

    @property
    def state(self) -> str:
        """Return "stopped", "busy" or "running"; "left" once a command has let it go."""
        return read_text(self.info, "state")

    def learn(self, frame: Frame) -> None:
        """Take over what a status or the end of a command says of the rank."""
        if "state" in frame:
            self.info = {key: value for key, value in frame.items() if key not in ("id", "out", "end")}
            self.job = read_text(frame, "job") or self.job
        elif read_text(frame, "end") in ENDS:
            self.info["state"] = "left"

    def ask(self, frame: Frame) -> int:
        """Send a request and return its number. Raises LinkClosedError."""
        number: int = next(self._numbers)
        self.link.send({**frame, "id": number})
        self._answers[number] = []
        return number

    def give_up(self, number: int, what: str) -> None:
        """Remember a request whose deadline has passed: its answer will be late."""
        self._answers.pop(number, None)
        self._overdue[number] = what

    def cancel(self, number: int) -> None:
        """Tell the rank that nobody waits for the answer to a request any longer."""
        with contextlib.suppress(LinkClosedError):
            self.link.send({"do": "cancel", "request": number})

    def take(self, number: int) -> list[Frame]:
        """Return the frames that have come for one request; the last is the one without a "part"."""
        self.sort()
        taken, self._answers[number] = self._answers.get(number, []), []
        if taken and "part" not in taken[-1]:
            del self._answers[number]
        return taken

    def sort(self) -> None:
        """Put each frame that has come to its request; answers to overdue requests are put aside as late."""
        while self.link.inbox:
            frame = self.link.inbox.popleft()
            number = frame.get("id")
            if not isinstance(number, int):
                continue
            if number in self._answers:
                self._answers[number].append(frame)
            elif number in self._overdue and "part" not in frame:
                self.late.append((self._overdue.pop(number), frame))
