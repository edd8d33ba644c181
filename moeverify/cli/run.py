"""`moeverify run`: the golden on one device, the layout on real ranks, the comparison, a verdict."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeverify.cli.arguments import CaseSelection, Escalate, Quiet, RunSettings
from moeverify.cli.context import BAD_INPUT, EXIT_CODES, CommandContext, open_context
from moeverify.cli.debug import debug_first
from moeverify.cli.github import publish_error
from moeverify.cli.options import with_groups
from moeverify.cli.outputs import Outputs

if TYPE_CHECKING:
    from moeverify.case.schema import Case
    from moeverify.controller.durations import Durations
    from moeverify.controller.run import OnEvent
    from moeverify.results.run import RunResult
    from moeverify.validation.load import Loaded


@with_groups
def run(
    *,
    selection: CaseSelection,
    outputs: Outputs,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Keep everything for report, diff and debugging."),
    ] = None,
    settings: RunSettings,
    follow_up: Annotated[
        bool,
        typer.Option(
            "--follow-up", help="Where axes explain a finding equally well, run what tells them apart."
        ),
    ] = False,
    escalate: Escalate = True,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug", help="Then train the first case that failed again, and stop its ranks at the finding."
        ),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Verify each case: its layout against its golden."""
    with open_context() as context:
        outputs = outputs.keeping(out)
        if context.is_first:
            outputs.check()
        loaded = selection.load_valid()
        cases = loaded.cases
        render_refused(loaded, context)
        options = settings.make_options(cases, out)

        def go(on_event: OnEvent, show: OnEvent) -> RunResult | None:
            from moeverify.controller.escalation import escalate as run_wider
            from moeverify.controller.follow_up import follow_up as run_follow_up
            from moeverify.controller.run import run_cases

            result = run_cases(cases, options, on_event)
            if escalate and result is not None:
                result = run_wider(cases, result, options, show)
            if follow_up and result is not None:
                result = run_follow_up(cases, result, options, show)
            results.append(result)
            return result

        from moeverify.controller.durations import Durations

        results: list[RunResult | None] = []
        # A fault may make a case hang, or end at once.
        durations = Durations.of(options) if settings.fault is None else None
        code = run_and_report(go, cases, outputs, context, quiet=quiet, refused=loaded, durations=durations)
        if debug and results[0] is not None:
            debug_first(cases, results[0], options, context)
        raise typer.Exit(code or (BAD_INPUT if loaded.problems else 0))


def render_refused(loaded: Loaded, context: CommandContext) -> None:
    """Print all that is wrong with the files of a folder that are left out, before the others take their time."""
    if not loaded.problems:
        return
    from moeverify.errors import CaseError
    from moeverify.report.problems import render_error

    error = CaseError(loaded.problems)
    render_error(error, context.err)
    publish_error(error, context.err)
    names = ", ".join(str(path) for path in loaded.refused)
    context.err.print(f"left out: {names}; the other cases run", soft_wrap=True)


def run_and_report(
    go: Callable[[OnEvent, OnEvent], RunResult | None],
    cases: Sequence[Case],
    outputs: Outputs,
    context: CommandContext,
    *,
    quiet: bool,
    refused: Loaded | None = None,
    durations: Durations | None = None,
) -> int:
    """Run, write and print what came of the cases, and return the exit code.

    `go` gets what hears of the events whose results count, and what only shows them. When the run ends early, what
    is there is written and printed before the reason is raised again. The files that are `refused` are skipped cases.
    `durations` are those of earlier runs, and get those of this one.
    """
    from moeverify.cli.keeper import Keeper
    from moeverify.report.progress import open_progress

    keeper = Keeper()
    known = {} if durations is None else durations.read(case.name for case in cases)
    try:
        with open_progress(context.out, quiet=quiet, durations=known) as progress:
            result = go(keeper.watch(progress.on_event), progress.on_event)
    except BaseException as error:
        if context.is_first:
            partial = _add_refused(keeper.make_partial(cases, error), refused)
            deliver(partial, outputs, context, quiet=quiet or not keeper.results)
        raise
    if result is None:  # one of several ranks; the first one reports
        return 0
    if durations is not None:
        durations.keep(result.cases)
    return deliver(_add_refused(result, refused), outputs, context, quiet=quiet)


def _add_refused(result: RunResult, refused: Loaded | None) -> RunResult:
    """Return the run with a skipped case for each file that was refused, so that its reports lose none."""
    if refused is None or not refused.refused:
        return result
    from moeverify.results.run import CaseResult

    skipped = []
    for path in refused.refused:
        own = [str(problem) for problem in refused.problems if problem.file == str(path)]
        reason = f"refused: {(own or [str(refused.problems[0])])[0]}"
        skipped.append(
            CaseResult(name=path.stem, file=str(path), verdict="skipped", reason=reason, ranks=0, seconds=0.0)
        )
    return result.model_copy(update={"cases": (*result.cases, *skipped)})


def deliver(result: RunResult, outputs: Outputs, context: CommandContext, *, quiet: bool) -> int:
    """Write the files first, since a reader of the console may hang up, then print; return the exit code."""
    from moeverify.report.text import render_run

    if not result.command:
        result = result.model_copy(update={"command": shlex.join(["moeverify", *sys.argv[1:]])})
    failures = outputs.write(result)
    with suppress(BrokenPipeError):  # the verdict stands, whether or not somebody reads all of it
        render_run(result, context.out, folder=outputs.folder, file=outputs.files.get("json"), quiet=quiet)
        failures += outputs.publish(result, context)
    for failure in failures:
        context.err.print(f"error: {failure}", soft_wrap=True)
    return EXIT_CODES[result.verdict] or (BAD_INPUT if failures else 0)
