"""Expressions of the code under test that a rank executes. No torch."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from moeverify.results.mutation import Span

Spans = dict[str, set[Span]]

_BYTES = 2  # bytes per instruction; `f_lasti` counts bytes


@contextmanager
def executed_spans(root: Path, files: Collection[str]) -> Iterator[Spans]:
    """Yield the spans of the instructions that this process executes until the block ends, by file.

    Only `files` below `root` are traced. Elsewhere only calls are observed, so that torch stays usable.
    """
    shown = {str(root / file): file for file in files}
    executed: dict[CodeType, set[int]] = {}
    spans: Spans = {file: set() for file in files}
    try:
        with _watch(shown, executed):
            yield spans
    finally:
        for code, seen in executed.items():
            places = _list_spans(code)
            found = (places[offset // _BYTES] for offset in seen)
            spans[shown[code.co_filename]] |= {span for span in found if span is not None}


if sys.version_info >= (3, 12):
    # Python 3.12 sends no instruction events to a trace function that requests them when a frame starts.
    _TOOL = 4  # an id that no kind of tool uses by convention

    @contextmanager
    def _watch(files: Collection[str], executed: dict[CodeType, set[int]]) -> Iterator[None]:
        """Collect the offsets of the instructions that this process executes, by code object of the files."""
        monitoring = sys.monitoring
        events = monitoring.events

        def enter(code: CodeType, offset: int) -> Any:
            if code.co_filename in files and code not in executed:
                executed[code] = set()
                monitoring.set_local_events(_TOOL, code, events.INSTRUCTION)
            return monitoring.DISABLE  # once is enough

        def step(code: CodeType, offset: int) -> Any:
            executed[code].add(offset)
            return monitoring.DISABLE

        monitoring.use_tool_id(_TOOL, __name__)
        monitoring.restart_events()  # an earlier block disabled each event after its first occurrence
        callbacks = {events.PY_START: enter, events.PY_RESUME: enter, events.INSTRUCTION: step}
        for event, callback in callbacks.items():
            monitoring.register_callback(_TOOL, event, callback)
        monitoring.set_events(_TOOL, events.PY_START | events.PY_RESUME)
        try:
            yield
        finally:
            monitoring.set_events(_TOOL, 0)
            for code in executed:
                monitoring.set_local_events(_TOOL, code, 0)
            for event in callbacks:
                monitoring.register_callback(_TOOL, event, None)
            monitoring.free_tool_id(_TOOL)

else:

    @contextmanager
    def _watch(files: Collection[str], executed: dict[CodeType, set[int]]) -> Iterator[None]:
        """Collect the offsets of the instructions that this process executes, by code object of the files."""

        def enter(frame: FrameType, event: str, argument: Any) -> Any:
            if frame.f_code.co_filename not in files:
                return None
            seen = executed.setdefault(frame.f_code, set())
            frame.f_trace_opcodes, frame.f_trace_lines = True, False

            def step(inner: FrameType, event: str, argument: Any) -> Any:
                if event == "opcode":
                    seen.add(inner.f_lasti)
                return step

            return step

        before = sys.gettrace()
        threading.settrace(enter)
        sys.settrace(enter)
        try:
            yield
        finally:
            sys.settrace(before)
            threading.settrace(None)


def _list_spans(code: CodeType) -> list[Span | None]:
    """Return the span of each instruction of a code object; None for an instruction without source."""
    return [
        None if None in place else (place[0], place[2], place[1], place[3])  # type: ignore[misc]
        for place in code.co_positions()
    ]


@cache
def list_spans_of_file(path: Path) -> frozenset[Span]:
    """Return the spans of all instructions of a file."""
    found: set[Span] = set()
    left = [compile(path.read_text(encoding="utf-8"), str(path), "exec")]
    while left:
        code = left.pop()
        left += [each for each in code.co_consts if isinstance(each, CodeType)]
        found |= {span for span in _list_spans(code) if span is not None}
    return frozenset(found)


def is_inside(inner: Span, outer: Span) -> bool:
    """Return whether a span is a part of another."""
    return outer[:2] <= inner[:2] and inner[2:] <= outer[2:]


def write_spans(path: Path, spans: Spans) -> None:
    """Write spans as JSON."""
    path.write_text(json.dumps({file: sorted(seen) for file, seen in spans.items() if seen}))


def read_spans(folder: Path) -> Spans:
    """Return the merged spans of all ranks that wrote to a folder."""
    found: Spans = {}
    for path in sorted(folder.glob("*.json")):
        for file, seen in json.loads(path.read_text()).items():
            found.setdefault(file, set()).update((a, b, c, d) for a, b, c, d in seen)
    return found
