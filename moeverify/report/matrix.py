"""Result matrix of `moeverify reshard`: a row per layout that saved, a column per layout that loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moeverify.report.console import STYLES, new_table
from moeverify.report.numbers import format_count
from moeverify.report.sanitize import clean
from moeverify.results.run import CaseResult

_GAP = 2


@dataclass(frozen=True)
class Matrix:
    """The pairs of one recipe, keyed by (saved by, loaded by); `names` are in row and column order."""

    recipe: str
    names: tuple[str, ...]
    cells: dict[tuple[str, str], CaseResult]

    def ranks(self, name: str) -> int:
        """Return on how many ranks a case loads; 0 if it only saves."""
        return next((case.ranks for (_, loader), case in self.cells.items() if loader == name), 0)


def find_matrices(cases: Sequence[CaseResult]) -> list[Matrix]:
    """Return one matrix per recipe among the pairs; empty if there are no pairs."""
    by_recipe: dict[str, dict[tuple[str, str], CaseResult]] = {}
    for case in cases:
        if case.saved_by:
            by_recipe.setdefault(case.recipe, {})[case.saved_by, case.loaded_by] = case
    return [
        Matrix(recipe, tuple(dict.fromkeys(name for pair in cells for name in pair)), cells)
        for recipe, cells in by_recipe.items()
    ]


def describe_cell(case: CaseResult | None) -> str:
    """Return a pair's verdict, `-` if skipped, or the first failed check and the number of others."""
    if case is None:
        return ""
    if case.verdict == "skipped":
        return "-"
    failed = [check.name for check in case.checks if check.verdict == "mismatch"]
    if not failed:
        return case.verdict.upper() if case.verdict == "error" else case.verdict
    return failed[0].upper() + (f" +{len(failed) - 1}" if len(failed) > 1 else "")


def render_matrices(cases: Sequence[CaseResult], console: Console) -> Iterator[Text | Table]:
    """Yield a headline and a table for each recipe.

    Column headers are the names of the layouts, or their row numbers if the names do not fit.
    """
    for matrix in find_matrices(cases):
        yield Text(f"{clean(matrix.recipe)}: rows saved, columns loaded and trained on", style="bold")
        heads = [_head(matrix, name) for name in matrix.names]
        cells = [describe_cell(case) for case in matrix.cells.values()]
        widths = [max(len(head), *map(len, cells)) + _GAP for head in heads]
        fits = max(map(len, heads)) + 4 + sum(widths) <= console.width
        table = new_table(console)
        table.add_column("saved by", no_wrap=True)
        for number, head in enumerate(heads, start=1):
            table.add_column(head if fits else str(number), no_wrap=True)
        for number, (name, head) in enumerate(zip(matrix.names, heads, strict=True), start=1):
            row = [matrix.cells.get((name, loader)) for loader in matrix.names]
            label = Text(head if fits else f"{number} {head}")
            table.add_row(label, *(_style(case) for case in row))
        yield table


def _head(matrix: Matrix, name: str) -> str:
    # If there are several recipes, the name of a single device includes the recipe.
    return f"{clean(name.removesuffix(f' {matrix.recipe}'))}, {format_count(matrix.ranks(name), 'rank')}"


def _style(case: CaseResult | None) -> Text:
    return Text(describe_cell(case), style=STYLES[case.verdict] if case is not None else "")
