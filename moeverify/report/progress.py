"""Progress of a run: a live view in a terminal, one line per event elsewhere."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from moeverify.report.console import print_lines, style_verdict
from moeverify.report.numbers import format_bound, format_count, format_number, format_ranks, format_seconds
from moeverify.report.probes import describe_row
from moeverify.report.sanitize import clean, elide
from moeverify.report.sorting import count_tensors, find_worst_check
from moeverify.results.measurement import Measurement
from moeverify.results.run import CaseResult, Event

_NUM_RECENT = 8
_BAR_WIDTH = 30
_NUM_NAMES = 3
BETWEEN = 10.0
"""Seconds between two estimates in a log."""

_SILENT = 2.0  # seconds of work without a line in a log
_VERDICT = 9  # width of the verdict column


class Progress(AbstractContextManager["Progress"]):
    """A view that shows nothing, the base class of the others; `on_event` receives the events of a run."""

    def on_event(self, event: Event) -> None:
        """Handle one event."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the view."""


def open_progress(
    console: Console,
    *,
    quiet: bool = False,
    noun: str = "case",
) -> Progress:
    """Return the suitable view: none if quiet, live in a capable terminal, otherwise lines.

    `noun` is the name of one counted thing.
    """
    if quiet or console.quiet:
        return Progress()
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveProgress(console, noun=noun)
    return LineProgress(console)


OnPart = Callable[[int, int], None]
"""Function that receives how many parts of a work are done, and how many there are."""


@contextmanager
def show_work(
    console: Console, text: str, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic
) -> Iterator[OnPart]:
    """Show a line while a command works, and the time that is left if it reports its parts.

    A terminal shows the line with its time. A log gets lines if the work takes longer than two seconds.
    """
    with open_progress(console, quiet=quiet) as progress:
        event = Event(kind="work", note=text)
        timer = threading.Timer(_SILENT, progress.on_event, [event])
        started = clock()
        is_log, told = isinstance(progress, LineProgress), started + _SILENT - BETWEEN
        if is_log:
            timer.daemon = True
            timer.start()
        else:
            progress.on_event(event)

        def count(num_done: int, num_total: int) -> None:
            nonlocal told
            now = clock()
            if 0 < num_done < num_total and (not is_log or now - told >= BETWEEN):
                told = now
                left = describe_left((now - started) / num_done * (num_total - num_done))
                note = f"{text}: {num_done} of {num_total}, {left}"
                progress.on_event(Event(kind="work", note=note))

        try:
            yield count
        finally:
            timer.cancel()


class Remaining:
    """Estimate of the seconds that are left, from the mean time of the cases that have ended."""

    def __init__(self, now: float) -> None:
        self._ended: list[float] = []
        self._num_done = self._num_total = 0
        self._is_running = False
        self._since = now

    def on_event(self, event: Event, now: float) -> None:
        """Note the start or the end of a case."""
        self._num_done = max(self._num_done, event.num_done)
        self._num_total = max(self._num_total, event.num_total)
        if event.kind in ("case-end", "golden-end"):
            self._ended.append(now - self._since)
        if event.kind in ("case-start", "case-end", "golden-end"):
            self._is_running = event.kind == "case-start"
            self._since = now

    def estimate(self, now: float) -> float | None:
        """Return the estimated seconds that are left, or None before a case has ended."""
        num_left = self._num_total - self._num_done
        if num_left <= 0 or not self._ended:
            return None
        mean = sum(self._ended) / len(self._ended)
        return mean * num_left - (min(now - self._since, mean) if self._is_running else 0.0)


class RemainingGoldens:
    """The goldens of a run that have ended, and the time of the others; each list of goldens counts anew."""

    def __init__(self, now: float) -> None:
        self._remaining = Remaining(now)

    def on_event(self, event: Event, now: float) -> None:
        """Note the start of a list of goldens, or the end of one."""
        if event.kind == "golden":
            self._remaining = Remaining(now)
        elif event.kind == "golden-end":
            self._remaining.on_event(event, now)

    def describe(self, event: Event, now: float) -> str:
        """Return the count after a golden has ended, and the time that is left unless it was the last."""
        left = self._remaining.estimate(now)
        count = f"{event.num_done} of {format_count(event.num_total, 'golden')}"
        return count if left is None else f"{count}, {describe_left(left)}"


def describe_left(seconds: float) -> str:
    """Return the words for an estimate of the seconds that are left."""
    # Tenths of a second would suggest a precision that the estimate does not have.
    about = f"{max(1.0, seconds):.0f} s" if seconds < 99.5 else format_seconds(seconds)
    return f"about {about} left"


class LineProgress(Progress):
    """One self-contained line per event, so that a growing log is readable, and at times the time that is left."""

    def __init__(
        self,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._clock = clock
        self._told = clock()
        self._remaining = Remaining(self._told)
        self._goldens = RemainingGoldens(self._told)

    def on_event(self, event: Event) -> None:
        """Print one line, and sometimes another one."""
        now = self._clock()
        self._goldens.on_event(event, now)
        if event.kind == "golden-end":
            if event.num_done < event.num_total:
                self._tell(self._goldens.describe(event, now), now)
            return
        self._remaining.on_event(event, now)
        self._print(event)
        left = self._remaining.estimate(now) if event.kind == "case-end" else None
        if left is not None:
            self._tell(describe_left(left), now)

    def _tell(self, text: str, now: float) -> None:
        """Print an estimate, unless the last one is recent."""
        if now - self._told >= BETWEEN:
            self._told = now
            print_lines(self._console, Text(text))

    def _print(self, event: Event) -> None:
        if event.kind in ("up", "lost"):
            return  # the case that lost its ranks reports it
        if event.kind == "case-end":
            total = f"/{event.num_total}" if event.num_total else ""
            count = f"[{event.num_done}{total}]"
            line = Text.assemble(count, " ", describe_end(event))
        else:
            line = Text(describe_event(event))
        print_lines(self._console, line)


class LiveProgress(Progress):
    """Live view: the latest verdicts, a bar, and the running case with its time; removed at the end."""

    def __init__(
        self,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
        noun: str = "case",
    ) -> None:
        self._console = console
        self._noun = noun
        self._ranks = ""
        self._clock = clock
        self._recent: deque[Event] = deque(maxlen=_NUM_RECENT)
        self._started = clock()
        self._since = self._started
        self._remaining = Remaining(self._started)
        self._goldens = RemainingGoldens(self._started)
        self._now = "starting"
        self._num_done = 0
        self._num_total = 0
        self._failed = 0
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        """Show the view."""
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the view and restore the cursor, also after an error."""
        self._live.stop()

    def on_event(self, event: Event) -> None:
        """Update the state; the screen refreshes at its own rate."""
        now = self._clock()
        self._goldens.on_event(event, now)
        if event.kind == "golden-end":
            self._now = self._goldens.describe(event, now)
            return
        self._num_done = max(self._num_done, event.num_done)
        self._num_total = max(self._num_total, event.num_total)
        self._remaining.on_event(event, now)
        if event.kind == "case-end":
            self._recent.append(event)
            self._failed += event.result is not None and event.result.has_failed
            self._now = "between cases"
        elif event.kind in ("up", "lost"):
            self._ranks = (
                f"{format_count(event.num_ranks, 'rank')} up" if event.kind == "up" else "ranks lost"
            )
            return
        else:
            self._ranks = "" if event.kind == "launch" else self._ranks
            self._now = describe_event(event)
        self._since = now

    def render(self) -> RenderableType:
        """Return the current view."""
        width = self._console.width
        now = self._clock()
        done = f"{self._num_done} of {self._num_total} {self._noun}s"
        count = Text(done if self._num_total else format_count(self._num_done, self._noun))
        if self._failed:
            count.append(f", {self._failed} failed", style="bold red")
        count.append(f", {format_seconds(now - self._started)}")
        left = self._remaining.estimate(now)
        if left is not None:
            count.append(f", {describe_left(left)}")
        room = max(1, min(_BAR_WIDTH, width - len(count) - 2))
        bar = ProgressBar(total=max(self._num_total, 1), completed=self._num_done, width=room)
        state = Table.grid(padding=(0, 1))
        state.add_row(bar, _fit(count, width - 2))
        running = f"{elide(self._now, max(20, width - 12))}  {format_seconds(now - self._since)}"
        if self._ranks and len(running) + len(self._ranks) + 4 <= width:
            running += f"  {self._ranks}"
        lines: list[RenderableType] = [_fit(describe_end(event, width), width) for event in self._recent]
        counted = [state] if self._num_done or self._num_total else []
        return Group(*lines, *counted, Text(running, no_wrap=True, overflow="crop"))


def _fit(line: Text, width: int) -> Text:
    """Return a copy cut to one line; lines that wrap would leave remnants of a live view on the screen."""
    copy = line.copy()
    copy.truncate(max(width - 1, 1), overflow="crop")
    return copy


def describe_event(event: Event) -> str:
    """Return a one-line description of an event."""
    verbs = {
        "launch": "starting ranks",
        "up": "ranks up",
        "lost": "ranks lost",
        "golden": "golden",
        "case-start": "running",
        "case-end": "done",
    }
    if event.kind == "work":
        return clean(event.note)
    size = ""
    if event.num_ranks:
        size = f"({format_count(event.num_ranks, 'rank')})"
    elif event.recipes:
        names = ", ".join(map(clean, event.recipes[:_NUM_NAMES]))
        more = ", ..." if len(event.recipes) > _NUM_NAMES else ""
        size = f"({format_count(len(event.recipes), 'recipe')}, each on one device: {names}{more})"
    line = " ".join(part for part in (verbs[event.kind], clean(event.case), size) if part)
    return f"{line}: {clean(event.note)}" if event.note else line


def describe_end(event: Event, width: int | None = None) -> Text:
    """Return one line with the verdict of a case and its numbers or reason.

    A name that does not fit into `width` is shortened in the middle, so that both ends stay visible.
    """
    if event.measured is not None:
        return Text(_describe_measured(event.measured))
    if event.row is not None:
        return describe_row(event.row)
    if event.result is None:
        return Text(f"{clean(event.case)} done")
    result = event.result
    name = clean(result.name)
    name = name if width is None else elide(name, max(8, width - _VERDICT - 1))
    line = Text.assemble(style_verdict(result.verdict), " " * max(1, _VERDICT - len(result.verdict)), name)
    return line.append(f"  {_describe_result(result)}")


def _describe_result(result: CaseResult) -> str:
    """Return why a case was skipped or failed, or how much was compared and the worst error."""
    if result.verdict in ("skipped", "error", "undecided"):
        return clean(result.reason).split("\n", 1)[0] or format_ranks(r.rank for r in result.rank_reports)
    if not result.checks:
        return ", ".join(filter(None, [clean(result.reason), format_seconds(result.seconds)]))
    parts = [f"{count_tensors(result)} tensors"]
    worst = find_worst_check(result)
    if worst is not None and worst.worst is not None:
        numbers = f"{format_number(worst.worst.error)} / {format_bound(worst.worst.bound)}"
        parts.append(f"worst {numbers} in {worst.name}")
    return ", ".join([*parts, format_seconds(result.seconds)])


def _describe_measured(measured: Measurement) -> str:
    """Return the time of a step and the peak memory, or why there is none."""
    if measured.step is None:
        return clean(f"{measured.name}: not measured: {measured.reason}").split("\n", 1)[0]
    memory = "" if measured.peak_memory is None else f", {measured.peak_memory / 2**30:.1f} GiB"
    return f"{clean(measured.name)}: {1e3 * measured.step.median:.1f} ms a step{memory}"
