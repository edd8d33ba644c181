"""`moeverify history`: kept runs in chronological order."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from moeverify.cli.arguments import Pattern
from moeverify.cli.context import BAD_INPUT, open_context


def history(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A folder with folders of --out, or with files of --json."),
    ],
    pattern: Pattern = None,
) -> None:
    """List kept runs, the oldest first: verdicts, and the largest error over its bound.

    The exit code says only whether there are runs.
    """
    with open_context() as context:
        from moeverify.errors import CaseError, Problem
        from moeverify.report.history import list_runs, render_history
        from moeverify.report.progress import show_work
        from moeverify.results.answer import HistoryRow, HistoryRows

        with show_work(context.err, f"reading the runs in {folder}") as count:
            runs, problems = list_runs(folder, pattern, count)
        for problem in problems:
            context.err.print(f"left out: {problem}", soft_wrap=True)
        if not runs:
            remedy = "`moeverify run CASE --out DIR/NAME` keeps one"
            which = f" with a case that matches `{pattern}`" if pattern is not None else ""
            raise CaseError([Problem(f"{folder} has no run{which}", path="DIR", remedy=remedy)])
        render_history(runs, context.out)
        rows = tuple(HistoryRow(**asdict(each)) for each in runs)
        context.reply.facts = HistoryRows(runs=rows, left_out=tuple(problems))
        raise typer.Exit(BAD_INPUT if problems else 0)
