"""`moeverify diff`: the changes from one run to another."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from moeverify.cli.context import open_context


def diff(
    before: Annotated[Path, typer.Argument(metavar="RUN_A", help="A folder of --out, or a file of --json.")],
    after: Annotated[Path, typer.Argument(metavar="RUN_B", help="Another one.")],
    factor: Annotated[
        float,
        typer.Option("--factor", min=1.0, help="List errors and bounds that changed by a larger factor."),
    ] = 10.0,
) -> None:
    """List the changes from one run to another.

    Exits with 1 when verdicts differ, or when only one of the runs has a case.
    """
    with open_context() as context:
        from moeverify.report.changes import compare_runs, render_changes, same_verdicts
        from moeverify.report.formats.json import read_run
        from moeverify.report.progress import show_work
        from moeverify.results.answer import RunChange, RunChanges

        with show_work(context.err, f"comparing {before} with {after}"):
            old, new = read_run(before), read_run(after)
            changes = compare_runs(old, new, factor=factor)
        render_changes(changes, old, new, context.out)
        context.reply.facts = RunChanges(changes=tuple(RunChange(**asdict(each)) for each in changes))
        raise typer.Exit(0 if same_verdicts(changes) else 1)
