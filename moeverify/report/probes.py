"""Console output of `moeverify doctor`: progress of the probes and their results."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from moeverify.report.console import new_table, print_lines, print_table
from moeverify.report.numbers import format_seconds
from moeverify.report.progress import BETWEEN, Remaining, describe_left
from moeverify.report.sanitize import clean
from moeverify.results.probe import ProbeEvent, ProbeRow
from moeverify.results.run import Event

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
_NUM_RECENT = 8


class ProbeProgress(AbstractContextManager["ProbeProgress"]):
    """Progress display that shows each probe's result as soon as it is known.

    A log gets one line per result, and at times the time that is left. A terminal shows the latest results above
    the running probes, their elapsed times and the time that is left. The view disappears at the end, when the
    full table is printed.
    """

    def __init__(
        self, console: Console, num_done: int, num_total: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._num_done = num_done
        self._num_total = num_total
        self._clock = clock
        self._told = clock()
        self._remaining = Remaining({}, self._told)
        self._running: dict[str, float] = {}
        self._recent: deque[Text] = deque(maxlen=_NUM_RECENT)
        self._stack = ExitStack()
        self._is_live = console.is_terminal and not console.is_dumb_terminal and not console.quiet

    def __enter__(self) -> Self:
        """Start the live view, if there is one."""
        if self._is_live:
            live = Live(
                console=self._console, get_renderable=self.render, refresh_per_second=4, transient=True
            )
            self._stack.enter_context(live)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the live view; lines printed to a log stay."""
        self._stack.close()

    def on_event(self, event: ProbeEvent) -> None:
        """Handle the start or the result of a probe."""
        if event.row is None:
            self._running[event.name] = self._clock()
            return
        self._running.pop(event.name, None)
        self._num_done += 1
        row, now = event.row, self._clock()
        end = Event(kind="case-end", case=row.name, num_done=self._num_done, num_total=self._num_total)
        self._remaining.on_event(end, now)
        status = Text(f"{row.status:<4}", style=_STYLES[row.status])
        count = f"[{self._num_done}/{self._num_total}]"
        line = Text.assemble(f"{count} ", status, f" {clean(row.name)}: {clean(row.value)}")
        if self._is_live:
            self._recent.append(line)
            return
        print_lines(self._console, line)
        left = self._remaining.estimate(now)
        if left is not None and now - self._told >= BETWEEN:
            self._told = now
            print_lines(self._console, Text(describe_left(left)))

    def render(self) -> RenderableType:
        """Return the current terminal view, each line cut to the width of the terminal."""
        now = self._clock()
        running = [f"{clean(name)} {format_seconds(now - since)}" for name, since in self._running.items()]
        state = Text(f"probing {', '.join(running)}" if running else "starting ranks")
        left = self._remaining.estimate(now)
        if left is not None:
            state.append(f", {describe_left(left)}")
        lines = [*self._recent, state]
        cut = [line.copy() for line in lines]
        for line in cut:
            line.truncate(max(self._console.width - 1, 1), overflow="ellipsis")
        return Group(*cut)


def _join(probe: ProbeRow) -> str:
    return clean("; ".join(filter(None, (probe.meaning, probe.remedy))))


def render_probes(probes: Sequence[ProbeRow], console: Console, *, missing: Sequence[str] = ()) -> None:
    """Print a table of the probes and a last line with the counts.

    `missing` names probes without a result because of an interrupt; the last line lists them.
    """
    table = new_table(console)
    table.add_column("probe", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("found", overflow="fold", ratio=2)
    table.add_column("meaning", overflow="fold", ratio=3)
    for probe in probes:
        status = Text(probe.status, style=_STYLES[probe.status])
        table.add_row(Text(clean(probe.name)), status, Text(clean(probe.value)), Text(_join(probe)))
    print_table(table, console)
    console.print()
    failed = sum(probe.status == "fail" for probe in probes)
    warned = sum(probe.status == "warn" for probe in probes)
    good = len(probes) - failed - warned
    counts = [(f"{good} ok", "ok"), (f"{warned} warn", "warn"), (f"{failed} fail", "fail")]
    line = Text(", ").join(Text(text, style=_STYLES[status]) for text, status in counts)
    if missing:
        line.append(f", {len(missing)} not probed: {clean(', '.join(missing))}")
    print_lines(console, line)
