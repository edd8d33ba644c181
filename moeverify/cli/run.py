"""`moeverify run`: golden on one device, layout on real ranks, comparison, verdict."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeverify.cli.arguments import (
    CaseSelection,
    Debug,
    Escalate,
    Keep,
    OutFolder,
    Quiet,
    RunSettings,
    Sketch,
)
from moeverify.cli.context import BAD_INPUT, EXIT_CODES, CommandContext, open_context, postponed_signals
from moeverify.cli.debug import debug_first
from moeverify.cli.github import publish_error
from moeverify.cli.options import OptionGroup, with_groups
from moeverify.cli.outputs import Outputs
from moeverify.cli.rerun import Verified, check_watch, rerun_on_changes
from moeverify.cli.track import Tracking

if TYPE_CHECKING:
    from moeverify.cases.schema import Case
    from moeverify.cases.validation.load import LoadedCases
    from moeverify.results.run import CaseResult, RunResult
    from moeverify.verification.controller.finished import FinishedCases
    from moeverify.verification.controller.options import RunOptions
    from moeverify.verification.controller.run import OnEvent


@dataclass(frozen=True)
class Judging(OptionGroup):
    """Options for the judgement of cases and the diagnosis of findings."""

    sketch: Sketch = False
    follow_up: Annotated[
        bool,
        typer.Option(
            "--follow-up", help="If several axes explain a finding, run a layout that distinguishes them."
        ),
    ] = False
    escalate: Escalate = True
    allow_undecided: Annotated[
        bool,
        typer.Option(
            "--allow-undecided",
            help="Exit with 0 instead of 4 if cases are undecided: rounding would hide too large an error.",
        ),
    ] = False
    explain_seconds: Annotated[
        float,
        typer.Option(
            "--explain-seconds",
            min=0.0,
            max=86400.0,
            metavar="S",
            help="Seconds for the search for the first wrong operation of a case; 0 leaves it out.",
        ),
    ] = 60.0
    debug: Debug = False

    def complete(self, options: RunOptions, cases: Sequence[Case]) -> RunOptions:
        """Return the run options with these settings.

        Raises: CaseError if sketches are demanded and a case does not permit them.
        """
        from moeverify.cases.validation.sketch import check_sketchable

        if self.sketch:
            check_sketchable(cases)
        return replace(
            options,
            explain_seconds=self.explain_seconds,
            must_decide=True,
            sketch="always" if self.sketch else "found",
        )


@with_groups
def run(
    *,
    selection: CaseSelection,
    outputs: Outputs,
    out: OutFolder = None,
    keep: Keep = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Stay, and rerun the cases that a changed file affects.")
    ] = False,
    settings: RunSettings,
    tracking: Tracking,
    judging: Judging,
    quiet: Quiet = False,
    timings: Annotated[bool, typer.Option("--timings", help="Show where the time went.")] = False,
) -> None:
    """Verify each case: its layout against its golden."""
    with open_context() as opened:
        context = outputs.direct(opened)
        if watch:
            check_watch()
        if context.is_first:
            outputs.keeping(out).check()
            tracking.check()

        def verify(loaded: LoadedCases, known: Mapping[str, CaseResult]) -> Verified:
            options = judging.complete(settings.make_options(loaded.cases, out), loaded.cases)
            verification = _Verification.open(loaded.cases, options, judging, keep, known, context)
            code = run_and_report(
                verification.run,
                loaded.cases,
                outputs.keeping(out),
                context,
                quiet=quiet,
                timings=timings,
                refused=loaded,
                finished=verification.finished.results,
            )
            extra = verification.follow(tracking, context)
            code = code or extra or (BAD_INPUT if loaded.problems else 0)
            return Verified(code, loaded.cases, verification.results, verification.finished.keys)

        loaded = selection.load_valid()
        render_refused(loaded, context)
        last = verify(loaded, {})
        keys = partial(_read_keys, settings, judging, out)
        raise typer.Exit(rerun_on_changes(selection, keys, verify, last, context) if watch else last.code)


def _read_keys(
    settings: RunSettings, judging: Judging, out: Path | None, cases: Sequence[Case]
) -> Mapping[str, str]:
    """Return the key of each case, which changes with anything that decides its verdict."""
    from moeverify.verification.controller.finished import make_key

    options = judging.complete(settings.make_options(list(cases), out), cases)
    return {case.name: make_key(case, options) for case in cases}


@dataclass
class _Verification:
    """The cases of one command, the results known from earlier runs, and the result of this run."""

    cases: Sequence[Case]
    options: RunOptions
    judging: Judging
    finished: FinishedCases
    result: RunResult | None = None

    @property
    def results(self) -> Mapping[str, CaseResult]:
        """Return the results of the cases, by name."""
        return {} if self.result is None else {case.name: case for case in self.result.cases}

    @classmethod
    def open(
        cls,
        cases: Sequence[Case],
        options: RunOptions,
        judging: Judging,
        keep: Path | None,
        known: Mapping[str, CaseResult],
        context: CommandContext,
    ) -> _Verification:
        """Return a verification that runs only cases that are neither known nor in the `--keep` file."""
        from moeverify.verification.controller.finished import FinishedCases

        finished = FinishedCases.open(keep, cases, options)
        if finished.results:
            text = f"{len(finished.results)} of {len(cases)} cases are in {keep}: the others run"
            context.out.print(text, soft_wrap=True)
        finished = finished.knowing(known)
        return cls(cases, options, judging, finished)

    def run(self, on_event: OnEvent, show: OnEvent) -> RunResult | None:
        """Return the verdicts of all cases; see `run_and_report`."""
        from moeverify.verification.controller.escalation import (
            WIDER,
            escalate,
            find_confirming,
            note_unasked,
        )
        from moeverify.verification.controller.follow_up import follow_up
        from moeverify.verification.controller.run import run_cases

        left = self.finished.list_left(self.cases)
        asks = self.judging.escalate
        # Below float64, a pass and an unexplained finding are final only after the run in a wider
        # precision.
        confirming = find_confirming(left, self.cases) if asks else {}
        escalated = {case.name for case in left if asks and WIDER[case.recipe.precision]}
        noting = note_unasked(left, confirming, on_event) if asks else on_event
        keep = self.finished.keeping(noting, confirming, escalated)
        result = run_cases(left, self.options, keep)
        result = self.finished.complete(result, self.cases)
        if asks and result is not None:
            result = escalate(
                self.cases, result, self.options, show, confirming=confirming, on_confirmed=on_event
            )
            self.finished.keep_rest(result.cases)
        if self.judging.follow_up and result is not None:
            result = follow_up(self.cases, result, self.options, show)
        if result is not None:
            result = result.model_copy(update={"allows_undecided": self.judging.allow_undecided})
        self.result = result
        return result

    def follow(self, tracking: Tracking, context: CommandContext) -> int:
        """Do the work that follows the report, and return its exit code; it cannot change a verdict."""
        if self.result is None:
            return 0
        from moeverify.report.figures import list_run_figures

        for failure in self.finished.failures:
            context.fail(failure)
        is_tracked = tracking.write(list_run_figures(self.result), context)
        if self.judging.debug:
            debug_first(self.cases, self.result, self.options, context)
        return 0 if is_tracked and not self.finished.failures else BAD_INPUT


def render_refused(loaded: LoadedCases, context: CommandContext) -> None:
    """Print the problems of the files that are left out, before the other cases run."""
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
    timings: bool = False,
    refused: LoadedCases | None = None,
    finished: Mapping[str, CaseResult] | None = None,
) -> int:
    """Run cases, write and print their results, and return the exit code.

    `go` receives two event callbacks: one for events whose results count, and one for display only. If the
    run ends early, the results so far are written and printed before the exception is raised again. Files
    in `refused` are reported as skipped cases. `finished` are results known before the run.
    """
    from moeverify.cli.keeper import Keeper
    from moeverify.report.progress import open_progress

    keeper = Keeper(finished or {})
    kept = outputs.find_kept() if context.is_first else None
    with ExitStack() as postponed:
        try:
            with open_progress(context.out, quiet=quiet) as progress:
                result = go(keeper.watch(progress.on_event, cases, kept), progress.on_event)
            # Before this line, an early end reports the cases so far; after it, the whole report is written.
            postponed.enter_context(postponed_signals())
        except BaseException as error:
            if context.is_first:
                partial = _add_refused(keeper.make_partial(cases, error), refused)
                deliver(partial, outputs, context, quiet=quiet or not keeper.results)
            raise
        if result is None:  # only the first of several ranks reports
            return 0
        return _deliver(_add_refused(result, refused), outputs, context, quiet=quiet, timings=timings)


def _add_refused(result: RunResult, refused: LoadedCases | None) -> RunResult:
    """Return the run with a skipped case for each refused file, so that reports mention them."""
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


def deliver(
    result: RunResult, outputs: Outputs, context: CommandContext, *, quiet: bool, timings: bool = False
) -> int:
    """Write the files, then print, and return the exit code. A signal takes effect afterwards.

    The files come first, since the reader of the console may close the pipe.
    """
    with postponed_signals():
        return _deliver(result, outputs, context, quiet=quiet, timings=timings)


def _deliver(
    result: RunResult, outputs: Outputs, context: CommandContext, *, quiet: bool, timings: bool
) -> int:
    from moeverify.report.next_steps import Kept

    if not result.command:
        result = result.model_copy(update={"command": shlex.join(["moeverify", *sys.argv[1:]])})
    failures = outputs.write(result, context, quiet=quiet)
    with suppress(BrokenPipeError):  # the verdict does not depend on the reader
        if timings:
            from moeverify.report.timings import render_timings

            render_timings(result, context.out)
        outputs.render(result, context, Kept(outputs.folder, outputs.files.get("json")), quiet=quiet)
        failures += outputs.publish(result, context)
    for failure in failures:
        context.fail(failure)
    is_allowed = result.allows_undecided and result.verdict == "undecided"
    return (0 if is_allowed else EXIT_CODES[result.verdict]) or (BAD_INPUT if failures else 0)
