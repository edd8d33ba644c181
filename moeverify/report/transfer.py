"""Progress of a weight conversion: a bar of bytes in a terminal, at times a line in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from moeverify.report.console import print_lines
from moeverify.report.numbers import format_size
from moeverify.report.progress import BETWEEN, describe_left
from moeverify.report.sanitize import elide

OnProgress = Callable[[str, int, int], None]

_NAME_WIDTH = 32


@contextmanager
def open_transfer(
    console: Console, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic
) -> Iterator[OnProgress]:
    """Yield a callback (current name, bytes done, total bytes); a bar disappears at the end."""
    if quiet or console.quiet:
        yield lambda name, done, total: None
        return
    if not console.is_terminal or console.is_dumb_terminal:
        yield _print_now_and_then(console, clock)
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task("", total=None)

        def show(name: str, done: int, total: int) -> None:
            bar.update(task, description=elide(name, _NAME_WIDTH), completed=done, total=total)

        yield show


def _print_now_and_then(console: Console, clock: Callable[[], float]) -> OnProgress:
    """Return a callback that prints how much is done and the time that is left, unless it did so recently."""
    started = told = clock()

    def show(name: str, done: int, total: int) -> None:
        nonlocal told
        now = clock()
        if 0 < done < total and now - told >= BETWEEN:
            told = now
            left = describe_left((now - started) * (total - done) / done)
            print_lines(console, Text(f"{format_size(done)} of {format_size(total)}, {left}"))

    return show


def describe_transfer(num_tensors: int, num_bytes: int, num_files: int, seconds: float) -> str:
    """Return a one-line summary of a transfer."""
    files = "1 file" if num_files == 1 else f"{num_files} files"
    speed = num_bytes / max(seconds, 1e-9) / 1e6
    return f"{num_tensors} tensors, {format_size(num_bytes)} in {files}, {seconds:.1f} s, {speed:.0f} MB/s"
