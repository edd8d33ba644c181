"""Recording of the user code that a script executes, step by step, with the Python values that it assigns."""

from __future__ import annotations

import os
import re
import zlib
from collections import defaultdict
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

from moeverify.explain.lines import Lines
from moeverify.explain.program import SETUP, Executed
from moeverify.input_file import open_input
from moeverify.scripts.record.lines import ExecutedFile, ExecutedStep

# Maximum number of lines of a function that are followed in a step. Each costs a few microseconds.
_MOST_LINES = 20_000

# Names and keys of which no text is recorded, such as `api_key`.
_SECRET = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)


class CodeRecorder:
    """Follows the code of the calling thread, from the functions that run now on."""

    def __init__(self) -> None:
        self._executed = Executed()
        self._lines = Lines(self._executed, _MOST_LINES)
        self._entered = ExitStack()
        self._is_followed = False
        self.follow(True)
        # Children, such as workers of a data loader, would go on.
        os.register_at_fork(after_in_child=lambda: self.follow(False))

    def end_step(self, step: int) -> ExecutedStep:
        """Return the code since the previous step, and begin the next one."""
        by_file = defaultdict[str, set[int]](set)
        names = defaultdict[str, list[tuple[int, str, tuple[Any, ...]]]](list)
        for file, line in self._executed.lines.pop(SETUP):
            by_file[file].add(line)
        for (file, line, name), values in self._executed.names.pop(SETUP).items():
            if not any(_is_secret(name, each) for each in values):
                names[file].append((line, name, tuple(values)))
        skipped = sorted(self._executed.skipped)
        self._executed.skipped.clear()
        self._lines.begin(SETUP)
        return ExecutedStep(
            step=step,
            files=tuple(
                ExecutedFile(
                    path=file,
                    checksum=checksum_source(file),
                    lines=tuple(sorted(by_file[file])),
                    names=tuple(names[file]),
                    skipped=tuple((first, last) for other, first, last in skipped if other == file),
                )
                for file in sorted({*by_file, *names})
            ),
        )

    def follow(self, is_followed: bool) -> None:
        """Follow the code that runs from now on, or do not."""
        if is_followed and not self._is_followed:
            self._entered.enter_context(self._lines.following(is_running=True))
        elif not is_followed:
            self._entered.close()
        self._is_followed = is_followed


def _is_secret(name: str, value: Any) -> bool:
    """Return whether an encoded value is or has the text of a name or key that may be a secret."""
    if isinstance(value, str):
        return _SECRET.search(name) is not None
    if not isinstance(value, tuple):
        return False
    *first, last = value or ("",)
    key = first[0] if first and isinstance(first[0], str) else name
    return _is_secret(key, last) or any(_is_secret(name, each) for each in first)


@cache
def checksum_source(path: str) -> int:
    """Return the CRC-32 of a source file, -1 if it cannot be read."""
    try:
        with open_input(Path(path)) as file:
            return zlib.crc32(file.read())
    except OSError:
        return -1
