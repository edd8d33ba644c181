"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate


def make_markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; what a cell holds stays in it: bars are escaped, and lines of one cell are joined.

    Cells are not padded: one long sentence would widen every row, and change all of them with it.
    """
    return tabulate(
        [[_escape(cell) for cell in row] for row in rows],
        headers=[_escape(header) for header in headers],
        tablefmt="github",
        stralign=None,
        disable_numparse=True,
    )


def _escape(cell: str) -> str:
    return " ".join(cell.split()).replace("|", "\\|")
