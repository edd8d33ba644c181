"""Which lines of the code under test a rank executes. No torch."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

Lines = dict[str, set[int]]


@contextmanager
def executed_lines(root: Path, files: Collection[str]) -> Iterator[Lines]:
    """Give the lines that this process executes until the block ends, by file.

    Of `files` below `root` alone: elsewhere calls are seen and nothing more, so that torch stays usable.
    """
    shown = {str(root / file): file for file in files}
    lines: Lines = {file: set() for file in files}

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        file = shown.get(frame.f_code.co_filename)
        if file is None:
            return None
        seen = lines[file]

        def step(inner: FrameType, event: str, argument: Any) -> Any:
            if event == "line":
                seen.add(inner.f_lineno)
            return step

        return step

    before = sys.gettrace()
    threading.settrace(enter)
    sys.settrace(enter)
    try:
        yield lines
    finally:
        sys.settrace(before)
        threading.settrace(None)


def write_lines(path: Path, lines: Lines) -> None:
    """Write lines as JSON."""
    path.write_text(json.dumps({file: sorted(seen) for file, seen in lines.items() if seen}))


def read_lines(folder: Path) -> Lines:
    """Return the lines of all ranks that wrote some to a folder."""
    found: Lines = {}
    for path in sorted(folder.glob("*.json")):
        for file, seen in json.loads(path.read_text()).items():
            found.setdefault(file, set()).update(seen)
    return found
