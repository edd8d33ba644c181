"""`moeverify report`: renders a kept run again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeverify.cli.arguments import Quiet
from moeverify.cli.context import BAD_INPUT, open_context, postponed_signals
from moeverify.cli.options import with_groups
from moeverify.cli.outputs import Outputs

if TYPE_CHECKING:
    from moeverify.cli.context import CommandContext


@with_groups
def report(
    *,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A folder of --out, or a file of --json.")],
    outputs: Outputs,
    serve: Annotated[
        int | None,
        typer.Option(
            "--serve",
            min=0,
            max=65535,
            metavar="PORT",
            help="Show the page in a browser of this machine, and follow a run that goes on; 0 is any port.",
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Show a run again, or write it in other formats.

    The exit code says only whether that worked.
    """
    with open_context() as opened:
        if serve is not None:
            _serve(run, serve, outputs, opened)
            return
        from moeverify.report.formats.json import read_run
        from moeverify.report.next_steps import Kept
        from moeverify.report.progress import show_work

        context = outputs.direct(opened)
        with show_work(context.err, f"reading {run}", quiet=quiet):
            result = read_run(run)
        outputs.check()
        with postponed_signals():
            failures = outputs.write(result, context, quiet=quiet)
            outputs.render(result, context, Kept.at(run), quiet=quiet)
            failures += outputs.publish(result, context)
            for failure in failures:
                context.fail(failure)
        raise typer.Exit(BAD_INPUT if failures else 0)


def _serve(run: Path, port: int, outputs: Outputs, context: CommandContext) -> None:
    """Serve the page until Ctrl-C, which is the usual end and no error."""
    from moeverify.errors import CaseError, Problem
    from moeverify.report.live import serve_page

    if outputs.files or outputs.brief:
        message = "the page is served, and no other report is written"
        raise CaseError([Problem(message, path="--serve", remedy="leave out the other formats")])

    def show(address: str) -> None:
        context.out.print(f"{address} shows {run}; Ctrl-C ends it", soft_wrap=True)
        context.out.file.flush()

    try:
        serve_page(run, port, show)
    except OSError as error:
        message = f"port {port} cannot be used: {error.strerror or error}"
        raise CaseError([Problem(message, path="--serve", remedy="name a free port, or 0 for any")]) from None
    except KeyboardInterrupt:
        return
