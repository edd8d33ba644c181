"""Ranks that died while stopped or armed: cause of death and last known place."""

from __future__ import annotations

import contextlib
import re
import time
from typing import Any

from multiprocessing_pdb.wire.identity import FileOwner
from multiprocessing_pdb.wire.process_exit import describe_status
from multiprocessing_pdb.wire.runtime_directory import RuntimeDirectory

Death = dict[str, Any]

_SILENT = "died without a word, as by SIGKILL (the out-of-memory killer sends it: see dmesg) or os._exit()"
_MOST_TEXT = 1 << 20
_FATAL = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_CURRENT = re.compile(r"^Current thread.*\n((?:  .*\n)+)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


def describe_death(
    directory: RuntimeDirectory, owner: FileOwner, status: int | None, *, is_left: bool
) -> Death | None:
    """Return a description of the end of a stopped or armed process, or None if it ended normally.

    `is_left` states that its file still exists: a process that ends normally removes it.
    """
    fatal, place = _read_fatal(directory, owner)
    unknown = _SILENT if is_left else ""
    how = describe_status(status) if status is not None else f"died: {fatal}" if fatal else unknown
    if not how:
        return None
    return {**vars(owner), "how": how, "place": place, "time": time.time()}


def _read_fatal(directory: RuntimeDirectory, owner: FileOwner) -> tuple[str, str]:
    """Return the error that faulthandler wrote when the process died, and the current Python line."""
    for _, record in directory.records():
        name = record.get("stack_file")
        if (record.get("pid"), record.get("start")) == (owner.pid, owner.start) and isinstance(name, str):
            with contextlib.suppress(OSError):
                return _parse_fatal(directory.read_text(name, _MOST_TEXT))
    return "", ""


def _parse_fatal(text: str) -> tuple[str, str]:
    fatal = _FATAL.search(text)
    if fatal is None:
        return "", ""
    current = _CURRENT.search(text, fatal.end())
    frame = _FRAME.search(current.group(1)) if current else None
    return fatal.group(1), f"{frame.group(1)}:{frame.group(2)} in {frame.group(3)}" if frame else ""


class LastSeen:
    """The last known place of each rank, for reports of its death."""

    def __init__(self) -> None:
        self._places: dict[tuple[object, object], tuple[str, bool, float]] = {}

    def note(self, info: dict[str, Any], place: str, *, is_running: bool) -> None:
        """Store the place of a rank."""
        if place:
            self._places[(info.get("pid"), info.get("start"))] = (place, is_running, time.time())

    def show(self, death: Death, job: str | None) -> str:
        """Return the line about a death for a console of `job`, or of any job."""
        name = f"rank {death['label']}" if str(death["label"]).isdecimal() else f"process {death['label']}"
        if job not in (None, death.get("job")):
            name += f" of job {death.get('job')}"
        text = f"{name} (pid {death['pid']}) {death['how']}"
        place, was_running, at = self._places.get((death["pid"], death["start"]), ("", False, 0.0))
        if death.get("place"):
            text += f"; last line {death['place']}"
        elif place and was_running:
            text += f"; {max(0.0, death['time'] - at):.0f} s before it was at {place}"
        elif place:
            text += f"; last line {place}"
        return text
