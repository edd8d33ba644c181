"""`moeverify bench`: what a step of each case costs, side by side, without any golden."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated

import typer

from moeverify.cli.arguments import Cases, Device, DeviceOption, JsonFile, Overrides, Pattern, Quiet
from moeverify.cli.context import FAILED, open_context


def bench(
    cases: Cases,
    *,
    overrides: Overrides = None,
    pattern: Pattern = None,
    json: JsonFile = None,
    device: DeviceOption = Device.auto,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks", min=1, help="Use at most this many ranks; cases that need more are left out."
        ),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps that are measured.")] = 10,
    warmup: Annotated[int, typer.Option("--warmup", min=1, help="Steps before those.")] = 3,
    timeout: Annotated[
        float | None, typer.Option("--timeout", min=1.0, metavar="S", help="Seconds a case may take.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Measure each case: time of a step, tokens and operations a second, memory, collectives.

    Needs no golden and compares nothing: `moeverify run` says whether what is fast is also right.
    """
    with open_context() as door:
        from moeverify.controller.bench import bench_cases
        from moeverify.report.bench import render_bench
        from moeverify.report.files import check_writable
        from moeverify.report.progress import open_progress
        from moeverify.validation.load import load_cases

        if json is not None and door.is_first:
            check_writable([json], None)  # before minutes of measuring
        loaded = load_cases(cases, overrides=tuple(overrides or ()), pattern=pattern)
        with open_progress(door.out, quiet=quiet) as progress:
            result = bench_cases(
                loaded,
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
            json.write_text(result.model_dump_json(indent=1))
        render_bench(result, door.out)
        if any(case.step is None for case in result.cases):
            raise typer.Exit(FAILED)
