"""`moeverify doctor`: the capabilities of this machine, and their consequences for verification."""

from __future__ import annotations

import typer

from moeverify.cli.context import BAD_INPUT, open_context


def doctor() -> None:
    """Probe this machine, and explain the results.

    Looks at torch, backends and their known faults, GPUs and optional packages. Ctrl-C keeps the results so far.
    """
    with open_context() as context:
        from moeverify.report.probes import ProbeProgress, render_probes
        from moeverify.verification.controller.doctor import Examination

        examination = Examination()
        num_known, num_rows = len(examination.rows), len(examination.names)
        try:
            with ProbeProgress(context.err, num_known, num_rows) as progress:
                examination.run(progress.on_event)
        finally:
            render_probes(examination.rows, context.out, missing=examination.missing)
        failed = any(row.status == "fail" for row in examination.rows)
        raise typer.Exit(BAD_INPUT if failed else 0)
