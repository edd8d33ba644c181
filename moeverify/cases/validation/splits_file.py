"""The file of `moeverify comm --splits`: the number of elements of each part of a collective."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from moeverify.cases.document import read_document
from moeverify.cases.entry import Entry, show
from moeverify.errors import CaseError, Problem

MOST_ELEMENTS = 64
"""The maximum number of elements in one part, because all of them are printed."""

_FIELD = "splits"
_EXAMPLES = {
    1: "`splits: [3, 1, 0, 2]`, the part of each rank",
    2: "`splits:` and a row `- [3, 1, 0, 2]` a rank",
}


def read_splits(path: Path, num_ranks: int, num_dims: int) -> tuple[tuple[int, ...], ...]:
    """Return the sizes in a file: one row per rank if `num_dims` is 2, a single row if it is 1.

    Each row has `num_ranks` sizes.

    Raises: CaseError with all problems of the file.
    """
    problems: list[Problem] = []
    example = _EXAMPLES[num_dims]
    tree = read_document(path, problems.append, fields=example)
    if tree is not None:
        problems += _find_problems(tree, num_ranks, num_dims, example)
    if problems or tree is None:
        raise CaseError(problems)
    found = tree.fields[_FIELD].plain()
    rows = tuple(map(tuple, found)) if num_dims == 2 else (tuple(found),)
    if not any(map(sum, rows)):
        place = tree.fields[_FIELD].place
        raise CaseError(
            [Problem("all parts are empty", place.file, place.line, _FIELD, "write a size above 0")]
        )
    return rows


def _find_problems(tree: Entry, num_ranks: int, num_dims: int, example: str) -> Iterator[Problem]:
    for name, entry in tree.fields.items():
        if name != _FIELD:
            yield Problem(
                f"unknown field `{name}`", entry.place.file, entry.place.line, name, f"write {example}"
            )
    if _FIELD not in tree.fields:
        yield Problem(f"the field `{_FIELD}` is missing", tree.place.file, None, _FIELD, f"write {example}")
        return
    entry = tree.fields[_FIELD]
    if num_dims == 1:
        yield from _check_row(entry, _FIELD, num_ranks, example)
        return
    rows = entry.content
    if not isinstance(rows, list):
        yield _expect("a row for each rank", entry, _FIELD, example)
        return
    if len(rows) != num_ranks:
        yield _expect(
            f"{num_ranks} rows, one for each rank", entry, _FIELD, "add rows, or change --world-size"
        )
    for index, row in enumerate(rows):
        yield from _check_row(row, f"{_FIELD}[{index}]", num_ranks, example)


def _check_row(entry: Entry, path: str, num_ranks: int, example: str) -> Iterator[Problem]:
    sizes = entry.content
    if not isinstance(sizes, list):
        yield _expect("a list of sizes", entry, path, f"write {example}")
        return
    if len(sizes) != num_ranks:
        yield _expect(
            f"{num_ranks} sizes, one for each rank", entry, path, "add sizes, or change --world-size"
        )
    for index, size in enumerate(sizes):
        value = size.content
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_ELEMENTS:
            wanted = f"an integer from 0 to {MOST_ELEMENTS}"
            yield _expect(wanted, size, f"{path}[{index}]", "write a number of elements")


def _expect(wanted: str, entry: Entry, path: str, remedy: str) -> Problem:
    message = f"expected {wanted}, got {show(entry)}"
    return Problem(message, entry.place.file, entry.place.line, path, remedy)
