"""`moeverify run`: the golden on one device, the layout on real ranks, the comparison, a verdict."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
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
from moeverify.cli.context import (
    BAD_INPUT,
    EXIT_CODES,
    CommandContext,
    is_continuous_integration,
    open_context,
)
from moeverify.cli.outputs import Outputs

if TYPE_CHECKING:
    from moeverify.case.schema import Case
    from moeverify.controller.run import OnEvent
    from moeverify.results.run import RunResult


def run(
    cases: Cases,
    *,
    overrides: Overrides = None,
    pattern: Pattern = None,
    json: JsonFile = None,
    junit: JunitFile = None,
    html: HtmlFile = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Keep everything for report, diff and debugging."),
    ] = None,
    device: DeviceOption = Device.auto,
    ranks: Ranks = None,
    timeout: Timeout = None,
    fault: Fault = None,
    require_goldens: RequireGoldens = None,
    cache: CacheFolder = None,
    goldens: GoldenFolder = DEFAULT_GOLDENS,
    follow_up: Annotated[
        bool,
        typer.Option(
            "--follow-up", help="Where axes explain a finding equally well, run what tells them apart."
        ),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Verify each case: its layout against its golden."""
    with open_context() as door:
        outputs = Outputs(json, junit, html, out)
        if door.is_first:
            outputs.check()
        from moeverify.validation.load import load_cases

        loaded = load_cases(cases, overrides=tuple(overrides or ()), pattern=pattern)
        check_fault(loaded, fault)
        from moeverify.controller.options import RunOptions

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

        def go(on_event: OnEvent, show: OnEvent) -> RunResult | None:
            from moeverify.controller.follow_up import follow_up as run_follow_up
            from moeverify.controller.run import run_cases

            result = run_cases(loaded, options, on_event)
            return (
                run_follow_up(loaded, result, options, show) if follow_up and result is not None else result
            )

        raise typer.Exit(run_and_report(go, loaded, outputs, door, quiet=quiet))


def check_fault(cases: list[Case], fault: str | None) -> None:
    """Make sure, before ranks start, that the function to call on them is there.

    Raises: CaseError.
    """
    from moeverify.case.function import examine_function
    from moeverify.controller.search_path import search_path
    from moeverify.errors import CaseError

    if fault is not None:
        found = (examine_function(fault, search_path(case), "--fault") for case in cases)
        problems = [problem for problem in found if problem is not None]
        if problems:
            raise CaseError(problems[:1])


def run_and_report(
    go: Callable[[OnEvent, OnEvent], RunResult | None],
    cases: Sequence[Case],
    outputs: Outputs,
    door: CommandContext,
    *,
    quiet: bool,
) -> int:
    """Run, write and print what came of the cases, and return the exit code.

    `go` gets what hears of the events whose results count, and what only shows them. When the run ends early, what
    is there is written and printed before the reason is raised again.
    """
    from moeverify.cli.keeper import Keeper
    from moeverify.report.progress import open_progress

    keeper = Keeper()
    try:
        with open_progress(door.out, quiet=quiet) as progress:
            result = go(keeper.watch(progress.on_event), progress.on_event)
    except BaseException as error:
        if door.is_first:
            deliver(keeper.make_partial(cases, error), outputs, door, quiet=quiet or not keeper.results)
        raise
    if result is None:  # one of several ranks; the first one reports
        return 0
    return deliver(result, outputs, door, quiet=quiet)


def deliver(result: RunResult, outputs: Outputs, door: CommandContext, *, quiet: bool) -> int:
    """Write the files first, since a reader of the console may hang up, then print; return the exit code."""
    from moeverify.report.text import render_run

    if not result.command:
        result = result.model_copy(update={"command": shlex.join(["moeverify", *sys.argv[1:]])})
    failures = outputs.write(result)
    with suppress(BrokenPipeError):  # the verdict stands, whether or not somebody reads all of it
        render_run(result, door.out, folder=outputs.folder, file=outputs.json, quiet=quiet)
    for failure in failures:
        door.err.print(f"error: {failure}", soft_wrap=True)
    return EXIT_CODES[result.verdict] or (BAD_INPUT if failures else 0)
