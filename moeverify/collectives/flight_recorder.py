"""A rank's last collectives in a mapped file, which is still there when the rank is killed. No torch."""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from pathlib import Path

from moeverify.results.trace import CollectiveRecord, State

NUM_SLOTS = 64
_SLOT_SIZE = 1024
_STARTED, _FINISHED, _FAILED = b"SFX"
_NAMES: Mapping[int, State] = {_STARTED: "started", _FINISHED: "finished", _FAILED: "failed"}
_HEAD = 3  # the state, and the length of the text in two bytes


class FlightFile:
    """A ring of records in a file; writing one costs a copy into the page cache and no system call."""

    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            file.truncate(NUM_SLOTS * _SLOT_SIZE)
            self._map = mmap.mmap(file.fileno(), NUM_SLOTS * _SLOT_SIZE)
        self._numbers = [0] * NUM_SLOTS

    def write(self, number: int, text: bytes) -> None:
        """Put record `number` into its slot as started; a text too long for a slot leaves the slot empty."""
        slot = number % NUM_SLOTS
        start = slot * _SLOT_SIZE
        size = len(text)
        self._numbers[slot] = number
        self._map[start] = 0
        if size > _SLOT_SIZE - _HEAD:
            return
        self._map[start + 1 : start + _HEAD + size] = size.to_bytes(2, "little") + text
        self._map[start] = _STARTED

    def finish(self, number: int, success: bool) -> None:
        """Mark record `number` as over, unless its slot has a later record by now."""
        slot = number % NUM_SLOTS
        start = slot * _SLOT_SIZE
        if self._numbers[slot] == number and self._map[start] != 0:
            self._map[start] = _FINISHED if success else _FAILED

    def clear(self) -> None:
        """Forget all records."""
        for slot in range(NUM_SLOTS):
            self._map[slot * _SLOT_SIZE] = 0

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()


def read_flight(path: Path) -> list[CollectiveRecord]:
    """Return the records in the file, oldest first; none when there is no such file."""
    try:
        data = path.read_bytes()
    except OSError:
        return []
    records = []
    for start in range(0, len(data), _SLOT_SIZE):
        if data[start] not in _NAMES:
            continue
        size = int.from_bytes(data[start + 1 : start + _HEAD], "little")
        try:
            content = json.loads(data[start + _HEAD : start + _HEAD + size])
            records.append(CollectiveRecord(**content, state=_NAMES[data[start]]))
        except ValueError:  # the rank was killed in the middle of this record
            continue
    return sorted(records, key=lambda record: record.number)
