"""Progress bar of a weight conversion: bytes, speed and remaining time; terminals only."""

from __future__ import annotations

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

from moeverify.report.numbers import format_size
from moeverify.report.sanitize import elide

OnProgress = Callable[[str, int, int], None]

_NAME_WIDTH = 32


@contextmanager
def open_transfer(console: Console, *, quiet: bool = False) -> Iterator[OnProgress]:
    """Yield a callback (current name, bytes done, total bytes); the bar disappears at the end."""
    if quiet or console.quiet or not console.is_terminal or console.is_dumb_terminal:
        yield lambda name, done, total: None
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


def describe_transfer(num_tensors: int, num_bytes: int, num_files: int, seconds: float) -> str:
    """Return a one-line summary of a transfer."""
    files = "1 file" if num_files == 1 else f"{num_files} files"
    speed = num_bytes / max(seconds, 1e-9) / 1e6
    return f"{num_tensors} tensors, {format_size(num_bytes)} in {files}, {seconds:.1f} s, {speed:.0f} MB/s"
