"""`moeverify golden`: records and refreshes goldens; no other command changes them."""

from __future__ import annotations

from typing import Annotated

import typer

from moeverify.cli.arguments import (
    DEFAULT_GOLDENS,
    CacheFolder,
    CaseSelection,
    Device,
    DeviceOption,
    GoldenFolder,
    Quiet,
    Sketch,
    Timeout,
)
from moeverify.cli.context import open_context
from moeverify.cli.options import with_groups


@with_groups
def golden(
    *,
    selection: CaseSelection,
    check: Annotated[
        bool,
        typer.Option("--check", help="Write nothing; exit with 1 if one is missing, differs or is unused."),
    ] = False,
    sketch: Sketch = False,
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Compute nothing: print the memory and time that --sketch would need."),
    ] = False,
    device: DeviceOption = Device.auto,
    cache: CacheFolder = None,
    goldens: GoldenFolder = DEFAULT_GOLDENS,
    timeout: Timeout = None,
    quiet: Quiet = False,
) -> None:
    """Record or refresh the goldens of cases."""
    with open_context() as context:
        cases = selection.load()
        from moeverify.report.files import check_writable
        from moeverify.report.goldens import is_stale, render_goldens, render_plans
        from moeverify.report.progress import open_progress, show_work
        from moeverify.results.answer import Goldens
        from moeverify.verification.controller.golden import plan_goldens, record_goldens
        from moeverify.verification.controller.options import RunOptions

        if not (check or plan):  # check before the long computation
            check_writable((), goldens)
        options = RunOptions(
            device=device.value,
            golden_folder=goldens,
            cache_folder=cache,
            timeout=timeout,
            sketch="always" if sketch else "never",
        )
        if plan:
            with show_work(context.err, "measuring this device", quiet=quiet):
                plans = plan_goldens(cases, options)
            render_plans(plans, context.out)
            context.reply.facts = Goldens(plans=tuple(plans))
            context.reply.advise(["golden", *selection.list_words(), "--sketch"], "record them")
            return
        with open_progress(context.out, quiet=quiet, noun="golden") as progress:
            rows = record_goldens(cases, options, progress.on_event, check=check)
        render_goldens(rows, context.out)
        context.reply.facts = Goldens(goldens=tuple(rows))
        is_wrong = check and is_stale(rows)
        purpose = "record them, after a look at the change" if is_wrong else "verify the cases"
        context.reply.advise(["golden" if is_wrong else "run", *selection.list_words()], purpose)
        raise typer.Exit(1 if is_wrong else 0)
