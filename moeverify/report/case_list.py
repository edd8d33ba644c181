"""Console table of the cases that were read, printed before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moeverify.report.console import choose_box, print_lines, print_table
from moeverify.report.numbers import format_count
from moeverify.report.sanitize import clean


@dataclass(frozen=True)
class CaseLine:
    """One valid case, described in words."""

    name: str
    ranks: int
    layout: str
    recipe: str


def render_catalog(lines: Sequence[CaseLine], console: Console) -> None:
    """Print the name, number of ranks, layout and recipe of each case, and the total counts."""
    table = Table(
        box=choose_box(console), pad_edge=False, show_edge=False, header_style="bold", padding=(0, 1, 0, 0)
    )
    table.add_column("case", overflow="fold")
    table.add_column("ranks", justify="right", no_wrap=True)
    table.add_column("layout", overflow="fold")
    table.add_column("recipe", overflow="fold")
    for line in lines:
        cells = (line.name, str(line.ranks), line.layout, line.recipe)
        table.add_row(*(Text(clean(cell)) for cell in cells))
    print_table(table, console)
    console.print()
    most = max((line.ranks for line in lines), default=0)
    counts = [
        format_count(len(lines), "case"),
        format_count(len({line.recipe for line in lines}), "recipe"),
        f"at most {format_count(most, 'rank')}",
    ]
    print_lines(console, Text(", ".join(counts)))
