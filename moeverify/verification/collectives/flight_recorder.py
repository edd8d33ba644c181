"""A memory-mapped file with a rank's last collectives, which survives a kill. Does not import torch."""

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
_HEAD = 3  # one byte for the state, two for the length of the text


class FlightFile:
    """Ring buffer of records in a file. A write is a copy into the page cache, without a system call."""

    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            file.truncate(NUM_SLOTS * _SLOT_SIZE)
            self._map = mmap.mmap(file.fileno(), NUM_SLOTS * _SLOT_SIZE)
        self._numbers = [0] * NUM_SLOTS

    def write(self, number: int, text: bytes) -> None:
        """Store record `number` as started. A text that is too long leaves the slot empty."""
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
        """Mark record `number` as finished or failed, unless a later record has replaced it."""
        slot = number % NUM_SLOTS
        start = slot * _SLOT_SIZE
        if self._numbers[slot] == number and self._map[start] != 0:
            self._map[start] = _FINISHED if success else _FAILED

    def clear(self) -> None:
        """Remove all records."""
        for slot in range(NUM_SLOTS):
            self._map[slot * _SLOT_SIZE] = 0

    def close(self) -> None:
        self._map.close()


def read_flight(path: Path) -> list[CollectiveRecord]:
    """Return the records in the file, oldest first, or an empty list if the file does not exist."""
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
        except ValueError:  # the rank was killed while it wrote this record
            continue
    return sorted(records, key=lambda record: record.number)
