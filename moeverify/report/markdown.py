"""Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate


def make_markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; bars are escaped, and the lines of a cell are joined.

    Cells are not padded. Otherwise one long cell would widen, and so change, every row of a page under
    version control.
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
