"""`moeverify compare`: comparison of two runs recorded by `moeverify watch`, one of them on one device."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from moeverify.cli.arguments import OutFolder, Quiet
from moeverify.cli.context import open_context
from moeverify.cli.options import with_groups
from moeverify.cli.outputs import Outputs
from moeverify.cli.run import deliver


@with_groups
def compare(
    *,
    expected: Annotated[
        Path, typer.Argument(metavar="RUN_A", help="The run to trust, of one device.", show_default=False)
    ],
    actual: Annotated[
        Path, typer.Argument(metavar="RUN_B", help="The run of many ranks.", show_default=False)
    ],
    outputs: Outputs,
    noise: Annotated[
        Path | None,
        typer.Option("--noise", metavar="RUN", help="A second RUN_A with --nudge: it measures rounding."),
    ] = None,
    out: OutFolder = None,
    quiet: Quiet = False,
) -> None:
    """Compare two runs of a training script that `moeverify watch` has recorded.

    First the values that must be equal (data, initial weights, optimizer options), then the first difference.
    """
    with open_context() as opened:
        from moeverify.report.progress import show_work
        from moeverify.results.run import RunResult
        from moeverify.scripts.compare.compare import compare_runs
        from moeverify.scripts.record.read import RecordedRun

        context, outputs = outputs.direct(opened), outputs.keeping(out)
        outputs.check()
        started, begun = datetime.now(UTC), time.monotonic()
        with show_work(context.err, f"comparing {expected} with {actual}", quiet=quiet) as count:
            runs = [RecordedRun.read(folder) for folder in (expected, actual)]
            nudged = None if noise is None else RecordedRun.read(noise)
            case = compare_runs(runs[0], runs[1], nudged, count)
        headers = [run.ranks[0].header for run in runs]
        result = RunResult(
            verdict="mismatch" if case.verdict == "mismatch" else "pass",
            environment={"torch": " and ".join(dict.fromkeys(header.torch for header in headers))},
            started=started.isoformat(timespec="seconds"),
            seconds=time.monotonic() - begun,
            cases=(case,),
        )
        raise typer.Exit(deliver(result, outputs, context, quiet=quiet))
