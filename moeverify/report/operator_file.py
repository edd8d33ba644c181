"""The operator table of one step (both sides) as gzipped JSON; ranks write it, the page reads it."""

from __future__ import annotations

import gzip
from pathlib import Path

from moeverify.errors import FormatError
from moeverify.json_file import JsonFile
from moeverify.report.files import write_atomically
from moeverify.results.operator_table import TABLE_VERSION, OperatorList, OperatorTable
from moeverify.results.run import CaseResult

OPERATORS_FOLDER = "operators"
_SUFFIX = ".json.gz"
_AGAIN = "run the case again with --out"


def name_file(folder: Path, case: str) -> Path:
    """Return the path of a case's operator file in the folder of a kept run."""
    return folder / OPERATORS_FOLDER / f"{case.replace('/', '-')}{_SUFFIX}"


def format_table(table: OperatorTable) -> str:
    """Return a table as a line of JSON."""
    return table.model_dump_json(exclude_defaults=True) + "\n"


def write(table: OperatorTable, path: Path) -> None:
    """Write a table atomically, gzipped if the name ends in `.gz`.

    Raises: OSError when writing fails.
    """
    raw = format_table(table).encode()
    write_atomically(path, gzip.compress(raw, 6, mtime=0) if path.suffix == ".gz" else raw)


def read(path: Path) -> OperatorTable:
    """Return the table stored in a file.

    Raises: FormatError if the file is missing, damaged, of another version, or not an operator table.
    """
    file = JsonFile.read(path, _AGAIN)
    version = file.get_object().get("version")
    if version != TABLE_VERSION:
        file.refuse(f"{version}, and this moeverify reads {TABLE_VERSION}", "version")
    table = file.build(OperatorTable)
    problem = _find_problem(table)
    if problem:
        raise FormatError(problem, _AGAIN, file=str(path))
    return table


def _find_problem(table: OperatorTable) -> str:
    """Return the first reference to an operator, rank or call site that does not exist; empty if valid."""
    lists = [
        (f"{side}.{rank}", each)
        for side in ("expected", "actual")
        for rank, each in enumerate(getattr(table, side))
    ]
    problems = [problem for name, listed in lists for problem in [check_list(name, listed)] if problem]
    sizes = [len(each.operators) for each in table.actual]
    if [len(each) for each in table.compared] != sizes:
        problems.append("compared: not as many as there are operators")
    for rank, compared in enumerate(table.compared):
        for place, each in enumerate(compared):
            is_rank = 0 <= each.other_rank < len(table.expected)
            if not (is_rank and -1 <= each.other < len(table.expected[each.other_rank].operators)):
                problems.append(f"compared.{rank}.{place}.other: no such operator")
    for number, (rank, place) in enumerate(table.causes):
        if not (0 <= rank < len(sizes) and 0 <= place < sizes[rank]):
            problems.append(f"causes.{number}: no such operator")
    return next(iter(problems), "")


def check_list(name: str, listed: OperatorList) -> str:
    """Return the first field of a list that refers to a missing operator or call site; empty if valid."""
    for place, op in enumerate(listed.operators):
        inputs = (each for each in op.inputs if isinstance(each, int))
        for field, numbers, size in (
            ("sites", op.sites, len(listed.sites)),
            ("inputs", inputs, len(listed.operators)),
            ("origin", () if op.origin == -1 else (op.origin,), len(listed.operators)),
        ):
            if not all(0 <= number < size for number in numbers):
                what = "call site" if field == "sites" else "operator"
                return f"{name}.operators.{place}.{field}: no such {what}"
    return ""


def find_table(case: CaseResult, run: Path) -> Path | None:
    """Return the operator file of a case if it exists, also if the kept `run` has been moved."""
    if not case.operators:
        return None
    path = Path(case.operators)
    folder = run if run.is_dir() else run.parent
    inside = [folder.joinpath(*path.parts[-depth:]) for depth in (2, 3)]
    return next((each for each in (*inside, path) if each.is_file()), None)
