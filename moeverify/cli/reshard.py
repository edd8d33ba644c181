"""`moeverify reshard`: save under every layout, load under every layout, compare bit for bit, and train on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeverify.cli.arguments import (
    DEFAULT_GOLDENS,
    CacheFolder,
    Cases,
    Device,
    DeviceOption,
    Fault,
    GoldenFolder,
    HtmlFile,
    JsonFile,
    JunitFile,
    Overrides,
    Pattern,
    Quiet,
    Ranks,
    RequireGoldens,
    Timeout,
)
from moeverify.cli.context import is_continuous_integration, open_context
from moeverify.cli.outputs import Outputs
from moeverify.cli.run import check_fault, run_and_report

if TYPE_CHECKING:
    from moeverify.controller.run import OnEvent
    from moeverify.results.run import RunResult


def reshard(
    cases: Cases,
    *,
    overrides: Overrides = None,
    pattern: Pattern = None,
    json: JsonFile = None,
    junit: JunitFile = None,
    html: HtmlFile = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Keep everything, the checkpoints too."),
    ] = None,
    device: DeviceOption = Device.auto,
    ranks: Ranks = None,
    timeout: Timeout = None,
    fault: Fault = None,
    require_goldens: RequireGoldens = None,
    cache: CacheFolder = None,
    goldens: GoldenFolder = DEFAULT_GOLDENS,
    quiet: Quiet = False,
) -> None:
    """Load the checkpoint of each layout into every layout, and train on.

    All ordered pairs of the cases that share a recipe, a single device included. The section `checkpoint` of a
    case says after which step it saves, and whether in the background.
    """
    with open_context() as door:
        outputs = Outputs(json, junit, html, out)
        if door.is_first:
            outputs.check()
        from moeverify.validation.load import load_cases

        loaded = load_cases(cases, overrides=tuple(overrides or ()), pattern=pattern)
        check_fault(loaded, fault)
        from moeverify.controller.options import RunOptions
        from moeverify.controller.reshard import make_pairs, run_pairs

        pairs = make_pairs(loaded)
        options = RunOptions(
            device=device.value,
            num_ranks=ranks,
            folder=out,
            require_goldens=is_continuous_integration() if require_goldens is None else require_goldens,
            golden_folder=goldens,
            cache_folder=cache,
            timeout=timeout,
            fault=fault,
        )

        def go(on_event: OnEvent, _: OnEvent) -> RunResult | None:
            return run_pairs(pairs, options, on_event)

        named = [pair.case for pair in pairs]
        raise typer.Exit(run_and_report(go, named, outputs, door, quiet=quiet))
