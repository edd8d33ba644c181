"""`moeverify doctor`: the capabilities of this machine, and their consequences for verification."""

from __future__ import annotations

import typer

from moeverify.cli.context import BAD_INPUT, open_context


def doctor() -> None:
    """Probe this machine, and explain the results.

    Looks at torch, backends and their known faults, GPUs, optional packages and limits, with remedies. Ctrl-C
    keeps the results so far.
    """
    with open_context() as context:
        from moeverify.report.probes import render_probes
        from moeverify.report.progress import open_progress
        from moeverify.results.probe import Diagnostics
        from moeverify.verification.controller.doctor import Examination

        examination = Examination()
        try:
            with open_progress(context.err, noun="probe") as progress:
                examination.run(progress.on_event)
        finally:
            render_probes(examination.rows, context.out, missing=examination.missing)
            found = Diagnostics(rows=tuple(examination.rows), missing=tuple(examination.missing))
            context.reply.document = found.model_dump_json(indent=2) + "\n"
        failed = any(row.status == "fail" for row in examination.rows)
        raise typer.Exit(BAD_INPUT if failed else 0)
