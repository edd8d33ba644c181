"""`moeverify bench`: the cost of a step of each case, side by side; needs no golden."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeverify.cli.arguments import (
    CaseSelection,
    Device,
    DeviceOption,
    Quiet,
    Ranks,
    Timeout,
    file_of_format,
)
from moeverify.cli.context import BAD_INPUT, FAILED, open_context, postponed_signals
from moeverify.cli.options import OptionGroup, with_groups
from moeverify.cli.track import Tracking

if TYPE_CHECKING:
    from moeverify.cases.schema import Case
    from moeverify.results.measurement import BenchRun


_Sweep = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        metavar="A.B=V,W",
        help="Measure each case once for each value, e.g. layout.ep=1,2; repeatable, for all combinations.",
    ),
]
_Iterations = Annotated[int, typer.Option("--iterations", min=1, max=10**6, help="Steps that are measured.")]
_Warmup = Annotated[int, typer.Option("--warmup", min=1, max=10**6, help="Steps before the measured ones.")]


@dataclass(frozen=True)
class BenchFiles(OptionGroup):
    """Files written in addition to the tables."""

    plots: Annotated[Path | None, file_of_format("plots")] = None
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            metavar="DIR",
            help="Keep a step of each case: a trace a rank for Perfetto, and a picture.",
        ),
    ] = None

    def check(self, *, has_sweep: bool) -> None:
        """Check, before minutes of measuring, that all files can be written.

        Raises: CaseError listing the paths that cannot, or if `--plots` has no sweep to show.
        """
        from moeverify.errors import CaseError, Problem
        from moeverify.report.files import check_writable

        if self.plots is not None and not has_sweep:
            remedy = "add --sweep A.B=V,W, or take --profile DIR for the picture of a step"
            raise CaseError([Problem("shows a sweep, and there is none", path="--plots", remedy=remedy)])
        check_writable([], self.plots, self.profile)

    def name_folders(self, cases: Sequence[Case]) -> dict[str, Path]:
        """Return the folder of each case below the folder of `--profile`."""
        if self.profile is None:
            return {}
        from moeverify.report.formats.plots import make_stem

        used: set[str] = set()
        return {case.name: self.profile.resolve() / make_stem(case.name, used) for case in cases}

    def write(self, result: BenchRun, folders: dict[str, Path]) -> None:
        """Write the pictures; the ranks have already written their traces."""
        if self.plots is None and self.profile is None:
            return
        from moeverify.report.formats.plots import write_step, write_sweep

        if self.plots is not None:
            write_sweep(result, self.plots)
        for case in result.cases:
            if case.name in folders:
                write_step(case, folders[case.name])


@with_groups
def bench(
    *,
    selection: CaseSelection,
    sweep: _Sweep = None,
    files: BenchFiles,
    tracking: Tracking,
    device: DeviceOption = Device.auto,
    ranks: Ranks = None,
    iterations: _Iterations = 10,
    warmup: _Warmup = 3,
    timeout: Timeout = None,
    quiet: Quiet = False,
) -> None:
    """Measure each case: time of a step, tokens and operations a second, memory, collectives.

    Needs no golden: `moeverify run` checks the results. `--plots` draws the sweep. Ctrl-C keeps the
    measurements so far.
    """
    with open_context() as context:
        from moeverify.report.bench import render_bench
        from moeverify.report.figures import list_bench_figures
        from moeverify.report.progress import open_progress
        from moeverify.verification.controller.bench import Bench, mark_swept

        if context.is_first:
            files.check(has_sweep=bool(sweep))
            tracking.check()
        combinations = selection.load_sweep(sweep or ())
        folders = files.name_folders([case for each in combinations for case in each.cases])
        bench = Bench(
            [case for each in combinations for case in each.cases],
            device=device.value,
            num_ranks=ranks,
            warmup=warmup,
            steps=iterations,
            timeout=timeout,
            profiles=folders,
        )
        try:
            with open_progress(context.out, quiet=quiet) as progress:
                bench.run(progress.on_event)
        finally:  # results measured before a Ctrl-C are kept
            result = bench.result
            if result is not None:
                with postponed_signals():
                    result = _complete(mark_swept(result, combinations))
                    context.reply.document = result.model_dump_json(indent=1)
                    files.write(result, folders)
                    render_bench(result, context.out)
        if result is None:  # only the first of several ranks reports
            return
        is_tracked = tracking.write(list_bench_figures(result), context)
        if any(case.step is None for case in result.cases):
            raise typer.Exit(FAILED)
        raise typer.Exit(0 if is_tracked else BAD_INPUT)


def _complete(result: BenchRun) -> BenchRun:
    return result.model_copy(update={"command": shlex.join(["moeverify", *sys.argv[1:]])})
