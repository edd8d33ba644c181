"""The console that all reports print to, and its styles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TextIO

from rich import box
from rich.console import Console
from rich.text import Text

from moeverify.report.sanitize import clean

if TYPE_CHECKING:
    from rich.table import Table

    from moeverify.results.finding import Verdict

# A log has no width of its own; at this width a table row fits without breaking a name.
LOG_WIDTH = 120
LABEL_WIDTH = 10

STYLES = {
    "pass": "green",
    "mismatch": "bold red",
    "undecided": "bold yellow",
    "error": "bold magenta",
    "skipped": "yellow",
}


class _Console(Console):
    """A console that prints no control characters, and raises when its reader is gone, where rich would exit."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print the objects; strings without escape sequences and control characters."""
        super().print(*(clean(each) if isinstance(each, str) else each for each in objects), **options)

    def on_broken_pipe(self) -> None:
        """Raise the error of the closed pipe.

        Raises: BrokenPipeError.
        """
        raise BrokenPipeError("the reader of this output is gone")


def open_console(file: TextIO, *, width: int | None = None, quiet: bool = False) -> Console:
    """Return a console on a stream; without a terminal it has no colour and lines of `LOG_WIDTH`.

    Text is printed verbatim: brackets in tensor names and stacks are not parsed as markup.

    Raises: BrokenPipeError on a later print if the reader is gone.
    """
    if width is None and not file.isatty():
        width = LOG_WIDTH
    return _Console(file=file, width=width, quiet=quiet, markup=False, highlight=False, emoji=False)


def choose_box(console: Console) -> box.Box:
    """Return the box style of a table: drawn lines in a UTF terminal, ASCII everywhere else."""
    can_draw = console.is_terminal and (console.encoding or "").lower().startswith("utf")
    return box.SIMPLE_HEAD if can_draw else _ASCII_HEAD


# A single rule below the header: the output stays easy to grep, cut and copy.
_ASCII_HEAD = box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


def new_table(console: Console) -> Table:
    """Return an empty table in the style of all reports."""
    from rich.table import Table

    return Table(
        box=choose_box(console), pad_edge=False, show_edge=False, header_style="bold", padding=(0, 1, 0, 0)
    )


def style_verdict(verdict: Verdict) -> Text:
    """Return the verdict in its colour; failures are in upper case and so readable without colour."""
    return Text(verdict if verdict in ("pass", "skipped") else verdict.upper(), style=STYLES[verdict])


def print_fact(console: Console, label: str, text: str, *, indent: int, style: str = "") -> None:
    """Print a label and its text; continuation lines are aligned with the first one."""
    start = f"{'':{indent}}{label:<{LABEL_WIDTH}}"
    body = Text(clean(text), style=style)
    if not console.is_terminal:
        console.print(Text(start) + Text(clean(text).replace("\n", "\n" + " " * len(start))), soft_wrap=True)
        return
    lines = body.wrap(console, max(20, console.width - len(start)), overflow="fold")
    for position, line in enumerate(lines):
        head = start if position == 0 else " " * len(start)
        line.rstrip()
        console.print(Text.assemble((head, "dim"), line), soft_wrap=True)


def print_lines(console: Console, text: Text) -> None:
    """Print text: wrapped in a terminal, one unbroken line each in a log, for searching."""
    if console.is_terminal:
        console.print(text, overflow="fold")
    else:
        console.print(text, soft_wrap=True)


def print_table(table: Table, console: Console) -> None:
    """Print a table; in a log without trailing spaces."""
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        console.print(Text(line.rstrip()), soft_wrap=True)
