"""`moeverify bench`: what a step of each case costs, side by side, without any golden."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from moeverify.cli.arguments import CaseSelection, Device, DeviceOption, Quiet, Ranks, Timeout
from moeverify.cli.context import BAD_INPUT, FAILED, open_context
from moeverify.cli.options import with_groups
from moeverify.cli.track import Tracking


@with_groups
def bench(
    *,
    selection: CaseSelection,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all results for machines.")
    ] = None,
    tracking: Tracking,
    device: DeviceOption = Device.auto,
    ranks: Ranks = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps that are measured.")] = 10,
    warmup: Annotated[int, typer.Option("--warmup", min=1, help="Steps before those.")] = 3,
    timeout: Timeout = None,
    quiet: Quiet = False,
) -> None:
    """Measure each case: time of a step, tokens and operations a second, memory, collectives.

    Needs no golden and compares nothing: `moeverify run` says whether what is fast is also right.
    """
    with open_context() as context:
        from moeverify.controller.bench import bench_cases
        from moeverify.report.bench import render_bench
        from moeverify.report.files import check_writable, write_atomically
        from moeverify.report.progress import open_progress
        from moeverify.report.trackers.figures import list_bench_figures

        if context.is_first:  # before minutes of measuring
            check_writable([] if json is None else [json])
            tracking.check()
        cases = selection.load()
        with open_progress(context.out, quiet=quiet) as progress:
            result = bench_cases(
                cases,
                device=device.value,
                num_ranks=ranks,
                warmup=warmup,
                steps=steps,
                timeout=timeout,
                on_event=progress.on_event,
            )
        if result is None:  # one of several ranks; the first one reports
            return
        result = result.model_copy(update={"command": shlex.join(["moeverify", *sys.argv[1:]])})
        if json is not None:
            write_atomically(json, result.model_dump_json(indent=1))
        render_bench(result, context.out)
        is_tracked = tracking.write(list_bench_figures(result), context)
        if any(case.step is None for case in result.cases):
            raise typer.Exit(FAILED)
        raise typer.Exit(0 if is_tracked else BAD_INPUT)
