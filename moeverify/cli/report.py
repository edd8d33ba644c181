"""`moeverify report`: renders a kept run again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moeverify.cli.arguments import Quiet
from moeverify.cli.context import BAD_INPUT, open_context, postponed_signals
from moeverify.cli.options import with_groups
from moeverify.cli.outputs import Outputs


@with_groups
def report(
    *,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A folder of --out, or a file of --json.")],
    outputs: Outputs,
    quiet: Quiet = False,
) -> None:
    """Show a run again, or write it in other formats.

    The exit code says only whether that worked.
    """
    with open_context() as opened:
        from moeverify.report.formats.json import read_run
        from moeverify.report.next_steps import Kept

        context = outputs.direct(opened)
        result = read_run(run)
        outputs.check()
        with postponed_signals():
            failures = outputs.write(result, context.err, quiet=quiet)
            outputs.render(result, context, Kept.at(run), quiet=quiet)
            failures += outputs.publish(result, context)
            for failure in failures:
                context.err.print(f"error: {failure}", soft_wrap=True)
        raise typer.Exit(BAD_INPUT if failures else 0)
