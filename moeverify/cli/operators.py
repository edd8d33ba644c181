"""`moeverify operators`: a page with the operators of both sides of a kept run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeverify.cli.arguments import file_of_format
from moeverify.cli.context import open_context

if TYPE_CHECKING:
    from moeverify.results.operator_table import OperatorTable


def operators(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="A folder of `run --out`; with RUN_B, of `watch --operators`, the run to trust.",
            show_default=False,
        ),
    ],
    other: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN_B]",
            help="A folder of `watch --operators`: the run to compare with it.",
            show_default=False,
        ),
    ] = None,
    *,
    case: Annotated[
        str | None, typer.Option("--case", metavar="NAME", help="Which case of RUN, if several failed.")
    ] = None,
    html: Annotated[Path, file_of_format("html")] = Path("operators.html"),
) -> None:
    """List the operators of a step on both sides, each with its counterpart and its error.

    For a case that failed in float64, this is the first step that differs; for two runs that `moeverify watch` has
    recorded, the step of `--operators`.
    """
    with open_context() as context:
        from moeverify.report.files import check_writable
        from moeverify.report.operator_file import format_table
        from moeverify.report.operator_page import describe_table, write
        from moeverify.report.progress import show_work

        check_writable([html])
        with show_work(context.err, f"listing the operators of {run}"):
            table = _read_kept(run, case) if other is None else _compare(run, other, case)
            context.reply.document = format_table(table)
            write(table, html)
        for line in describe_table(table):
            context.out.print(line, soft_wrap=True, highlight=False, markup=False)
        context.out.print(f"written: {html}", soft_wrap=True)


def _compare(run: Path, other: Path, case: str | None) -> OperatorTable:
    """Return the operators of two recorded runs.

    Raises: FormatError if one of them has none; CaseError if a case is named.
    """
    from moeverify.errors import CaseError, Problem
    from moeverify.scripts.compare.operators import compare_operators

    if case is not None:
        message = "recorded scripts have no cases"
        raise CaseError([Problem(message, path="--case", remedy="leave it out, or name one RUN")])
    return compare_operators(run, other)


def _read_kept(run: Path, name: str | None) -> OperatorTable:
    """Return the operators of a case of a kept run.

    Raises: FormatError if there are none; CaseError if the case is ambiguous or unknown.
    """
    from moeverify.errors import CaseError, FormatError, Problem
    from moeverify.report.formats.json import read_run
    from moeverify.report.operator_file import find_table, read
    from moeverify.scripts.record.settings import RANK_FILE

    if any(run.glob(RANK_FILE.format(rank="*"))):
        raise FormatError(f"{run} is a recorded script", "name RUN_B too: the run to compare with it")
    cases = read_run(run).cases
    kept = {each.name: path for each in cases if (path := find_table(each, run)) is not None}
    if not kept:
        raise FormatError(
            f"{run} has no operators of a case: they are kept where results differ in float64",
            "run the case with --out, and without --explain-seconds 0",
        )
    if name is None and len(kept) > 1:
        message = f"several cases have operators: {', '.join(kept)}"
        raise CaseError([Problem(message, path="--case", remedy="name one of them")])
    if name is not None and name not in kept:
        message = f"{run} has no operators of `{name}`"
        raise CaseError([Problem(message, path="--case", remedy=f"name one of {', '.join(kept)}")])
    return read(kept[name or next(iter(kept))])
