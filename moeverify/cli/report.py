"""`moeverify report`: a run that was kept, rendered again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moeverify.cli.arguments import HtmlFile, JsonFile, JunitFile, Quiet
from moeverify.cli.context import BAD_INPUT, open_context
from moeverify.cli.outputs import Outputs


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A folder of --out, or a file of --json.")],
    *,
    json: JsonFile = None,
    junit: JunitFile = None,
    html: HtmlFile = None,
    quiet: Quiet = False,
) -> None:
    """Show a run again, or write it in other formats.

    The exit code says only whether that worked.
    """
    with open_context() as door:
        from moeverify.report.formats.json import read_run
        from moeverify.report.text import render_run

        outputs = Outputs(json, junit, html)
        result = read_run(run)
        outputs.check()
        failures = outputs.write(result)
        folder, file = (run, None) if run.is_dir() else (None, run)
        render_run(result, door.out, folder=folder, file=file, quiet=quiet)
        for failure in failures:
            door.err.print(f"error: {failure}", soft_wrap=True)
        raise typer.Exit(BAD_INPUT if failures else 0)
