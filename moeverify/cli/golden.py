"""`moeverify golden`: the only way a golden changes."""

from __future__ import annotations

from typing import Annotated

import typer

from moeverify.cli.arguments import (
    DEFAULT_GOLDENS,
    CacheFolder,
    Cases,
    Device,
    DeviceOption,
    GoldenFolder,
    Overrides,
    Pattern,
    Quiet,
)
from moeverify.cli.context import open_context


def golden(
    cases: Cases,
    *,
    overrides: Overrides = None,
    pattern: Pattern = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Write nothing; exit with 1 if one is missing, differs or is unused."),
    ] = False,
    device: DeviceOption = Device.auto,
    cache: CacheFolder = None,
    goldens: GoldenFolder = DEFAULT_GOLDENS,
    quiet: Quiet = False,
) -> None:
    """Record or refresh the goldens of cases."""
    with open_context() as door:
        from moeverify.validation.load import load_cases

        loaded = load_cases(cases, overrides=tuple(overrides or ()), pattern=pattern)
        from moeverify.controller.golden import record_goldens
        from moeverify.controller.options import RunOptions
        from moeverify.report.goldens import is_stale, render_goldens
        from moeverify.report.progress import open_progress

        options = RunOptions(device=device.value, golden_folder=goldens, cache_folder=cache)
        with open_progress(door.out, quiet=quiet) as progress:
            rows = record_goldens(loaded, options, progress.on_event, check=check)
        render_goldens(rows, door.out)
        raise typer.Exit(1 if check and is_stale(rows) else 0)
