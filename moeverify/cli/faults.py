"""`moeverify faults`: real bugs, mutants, and clean runs that must not raise an alarm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeverify.cli.arguments import (
    CacheFolder,
    Device,
    DeviceOption,
    Escalate,
    Keep,
    Pattern,
    Quiet,
    Seed,
    Timeout,
    file_of_format,
)
from moeverify.cli.context import EXIT_CODES, CommandContext, open_context, own_sections, postponed_signals

if TYPE_CHECKING:
    from rich.console import Console

    from moeverify.faults.fault import Fault
    from moeverify.results.benchmark_rows import FaultRow
    from moeverify.results.listed import ListedFaults
    from moeverify.verification.controller.mutation import MutationOptions, RanMutants
    from moeverify.verification.controller.options import RunOptions

faults = typer.Typer(help="The benchmark of real bugs: list, show, run; and clean runs that must pass.")


class FaultPrecision(StrEnum):
    """Precision in which the ranks compute."""

    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"
    mixed = "mixed"


Numbers = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FAULT]...",
        help="Faults by number (A05), or by class, its name (expert_gradients) or letter (A); all if left out.",
    ),
]
InPrecision = Annotated[
    FaultPrecision | None,
    typer.Option(
        "--precision", help="Run the faults that are bugs in this other precision.", show_default=False
    ),
]
Markdown = Annotated[Path | None, file_of_format("markdown")]
Without = Annotated[
    list[str] | None,
    typer.Option(
        "--without",
        metavar="HYPOTHESIS",
        help="Leave out a hypothesis, or `explain`: the search for the first wrong operation; repeatable.",
    ),
]
_Number = Annotated[int, typer.Option("--number", min=1, max=1_000_000, help="How many mutants to choose.")]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="HYPOTHESIS", help="Leave out all other hypotheses; repeatable."),
]


@faults.command("list")
def list_faults(numbers: Numbers = None, *, pattern: Pattern = None) -> None:
    """List faults, one a line: number, class, the bug, and where it happened. `-k` searches the lines."""
    with open_context() as context:
        from moeverify.faults.choice import choose_faults, describe

        with own_sections():
            chosen = choose_faults(numbers or [], pattern)
        for fault in chosen:
            context.out.print(describe(fault), markup=False, highlight=False, soft_wrap=True)
        context.reply.facts = _describe_faults(chosen)
        context.reply.advise(["faults", "run", *(fault.number for fault in chosen[:1])], "inject one")


def _describe_faults(chosen: Sequence[Fault]) -> ListedFaults:
    from moeverify.faults.choice import find_class
    from moeverify.results.listed import ListedFault, ListedFaults

    listed = (
        ListedFault(
            number=fault.number,
            group=find_class(fault).name,
            title=fault.title,
            source=fault.source,
            mechanism=fault.mechanism,
            trigger=fault.trigger,
        )
        for fault in chosen
    )
    return ListedFaults(faults=tuple(listed))


@faults.command("show")
def show(numbers: Annotated[list[str], typer.Argument(metavar="FAULT...")]) -> None:
    """Show the origin of a fault, its effect, and how to run a case with it."""
    with open_context() as context:
        from moeverify.cases.axes.describe import describe_layout
        from moeverify.cases.schema import PRECISIONS
        from moeverify.faults.choice import choose_faults, find_class
        from moeverify.report.words.expected import describe_expected

        chosen = choose_faults(numbers)
        context.reply.facts = _describe_faults(chosen)
        context.reply.advise(["faults", "run", *(fault.number for fault in chosen)], "inject them")
        for fault in chosen:
            expected = describe_expected(fault.expected.where, fault.expected.causes)
            group = find_class(fault)
            lines = [
                f"{fault.number}: {fault.title}",
                f"  class      {group.letter}, {group.name}: {group.title}",
                f"  source     {fault.source}",
                f"  mechanism  {fault.mechanism}",
                f"  trigger    {fault.trigger}",
                f"  case       {describe_layout(fault.case.layout)}",
                f"  expected   {expected}",
                f"  inject     moeverify run CASE --fault {fault.number}",
            ]
            if fault.precisions != PRECISIONS:
                lines.append(f"  precision  a bug in recipes of {' or '.join(fault.precisions)}")
            if fault.notes:
                lines.append(f"  notes      {fault.notes}")
            context.out.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


@faults.command("run")
def run(
    numbers: Numbers = None,
    *,
    pattern: Pattern = None,
    precision: InPrecision = None,
    escalate: Escalate = True,
    without: Without = None,
    only: Only = None,
    markdown: Markdown = None,
    device: DeviceOption = Device.auto,
    cache: CacheFolder = None,
    quiet: Quiet = False,
) -> None:
    """Inject faults, one run each, and say which were detected, located and named.

    `-k` searches the lines of `faults list`. Exit code 1 when a fault was not detected, 3 when a rank failed.
    """
    with open_context() as context:
        from moeverify.explain.fitting.order import EXPLAIN
        from moeverify.faults.choice import choose_faults
        from moeverify.report.files import check_writable
        from moeverify.verification.controller.fault_benchmark import change_precision, choose_left_out

        chosen = choose_faults(numbers or [], pattern)
        if precision is not None:
            chosen = change_precision(chosen, precision.value)
        check_writable([markdown] if markdown is not None else [])
        left_out = choose_left_out(without or (), only or ())
        options = replace(_options(device, cache), without=left_out)
        if EXPLAIN in left_out:
            options = replace(options, explain_seconds=0.0)
        rows = _run_all(chosen, options, context, escalates=escalate, quiet=quiet)
        words = ["moeverify faults run", *(numbers or [])]
        words += [f"--precision {precision.value}"] if precision is not None else []
        words += [f"-k '{pattern}'"] if pattern is not None else []
        words += [] if escalate else ["--no-escalate"]
        words += [f"--without {name}" for name in without or ()] + [f"--only {name}" for name in only or ()]
        with postponed_signals():
            context.reply.document = _report_faults(rows, context, device, " ".join(words), markdown)
        missed = {"pass": "mismatch"}  # a missed fault has the verdict pass
        verdicts = ["pass" if row.detected else missed.get(row.verdict, row.verdict) for row in rows]
        raise typer.Exit(_conclude(verdicts))


def _report_faults(
    rows: Sequence[FaultRow],
    context: CommandContext,
    device: Device,
    command: str,
    markdown: Path | None,
) -> str:
    """Print the table of faults, write the page that was asked for, and return the rows as JSON."""
    from moeverify.report.faults import render_faults, write_faults, write_json
    from moeverify.report.files import write_atomically
    from moeverify.verification.controller.machine import choose_device, describe_environment

    render_faults(rows, context.out)
    environment = describe_environment(choose_device(device.value))
    if markdown is not None:
        write_atomically(markdown, write_faults(rows, environment, command))
    return write_json(rows, environment, command)


def _run_all(
    chosen: Sequence[Fault], options: RunOptions, context: CommandContext, *, escalates: bool, quiet: bool
) -> list[FaultRow]:
    """Return the rows of all faults; if the run ends early, print the rows of the finished ones."""
    from moeverify.cli.keeper import Keeper
    from moeverify.report.faults import render_faults
    from moeverify.report.progress import open_progress
    from moeverify.report.words.wider import describe_num_unasked
    from moeverify.verification.controller.fault_benchmark import count_unasked, run_faults, score_finished

    keeper = Keeper()
    try:
        with open_progress(context.out, quiet=quiet) as progress:
            return run_faults(
                chosen,
                options,
                keeper.watch(progress.on_event),
                escalates=escalates,
                on_wider=progress.on_event,
            )
    except BaseException:
        if keeper.results:
            render_faults(score_finished(chosen, keeper.results), context.out)
            num_unasked = count_unasked(chosen, keeper.results) if escalates else 0
            if num_unasked:
                context.out.print(describe_num_unasked(num_unasked))
        raise


@faults.command("clean")
def clean(
    *,
    num_seeds: Annotated[
        int, typer.Option("--seeds", min=1, max=1000, help="How many seeds for each setting.")
    ] = 1,
    pattern: Pattern = None,
    keep: Keep = None,
    markdown: Markdown = None,
    device: DeviceOption = Device.auto,
    cache: CacheFolder = None,
    quiet: Quiet = False,
) -> None:
    """Run clean cases over layouts, precisions, recipes and seeds; every alarm is a false one.

    `-k` searches groups and names. Exit code 1 when there was an alarm, 3 when a rank failed.
    """
    with open_context() as context:
        from moeverify.report.faults import summarize_clean, write_clean
        from moeverify.report.files import check_writable, write_atomically
        from moeverify.report.progress import open_progress
        from moeverify.results.answer import CleanRuns
        from moeverify.results.benchmark_rows import CleanRow
        from moeverify.verification.controller.clean_matrix import choose_clean, run_clean
        from moeverify.verification.controller.kept import KeptRows
        from moeverify.verification.controller.machine import choose_device, describe_environment

        runs = choose_clean(num_seeds, pattern)
        check_writable([path for path in (keep, markdown) if path is not None])
        environment = describe_environment(choose_device(device.value))
        kept = KeptRows(keep, environment, CleanRow)
        with open_progress(context.out, quiet=quiet) as progress:
            rows = run_clean(runs, _options(device, cache), progress.on_event, kept)
        for line in summarize_clean(rows):
            context.out.print(line, markup=False, highlight=False)
        if markdown is not None:
            command = f"moeverify faults clean --seeds {num_seeds}"
            command += f" -k '{pattern}'" if pattern is not None else ""
            write_atomically(markdown, write_clean(rows, environment, command))
        context.reply.facts = CleanRuns(environment=environment, runs=tuple(rows))
        raise typer.Exit(_conclude([row.verdict for row in rows]))


@faults.command("mutate")
def mutate(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MUTANT]...", help="Mutants by name; chosen by the seed if left out."),
    ] = None,
    *,
    number: _Number = 60,
    seed: Seed = 0,
    list_only: Annotated[bool, typer.Option("--list", help="Show all mutants, and run none.")] = False,
    keep: Keep = None,
    markdown: Markdown = None,
    timeout: Timeout = 100.0,
    precision: InPrecision = None,
    escalate: Escalate = True,
    device: DeviceOption = Device.auto,
    cache: CacheFolder = None,
    quiet: Quiet = False,
) -> None:
    """Make bugs by machine: rewrite the parallel code at one place each, and verify the result.

    Exit code 1 when a mutant survived that should not.
    """
    with open_context() as context:
        if list_only:
            _print_mutants(context.out)
            return
        from moeverify.report.files import check_writable, write_atomically
        from moeverify.report.mutation import write_json, write_mutants
        from moeverify.report.progress import open_progress
        from moeverify.verification.controller.mutation import MutationOptions, run_mutants

        check_writable([path for path in (keep, markdown) if path is not None])
        options = replace(_options(device, cache), timeout=timeout)
        how = MutationOptions(tuple(names or ()), number, seed or 0, keep, escalates=escalate)
        if precision is not None:
            how = replace(how, precision=precision.value)
        with open_progress(context.out, quiet=quiet) as progress:
            ran = run_mutants(how, options, progress.on_event)
        _print_rates(context.out, ran, precision)
        command = _name_command(how)
        context.reply.document = write_json(ran.rows, ran.environment, command)
        if markdown is not None:
            counts = (ran.num_all, ran.num_unreached)
            write_atomically(markdown, write_mutants(ran.rows, ran.environment, command, counts))
        raise typer.Exit(int(any(row.outcome == "survived" for row in ran.rows)))


def _print_rates(console: Console, ran: RanMutants, precision: FaultPrecision | None) -> None:
    """Print the counts and rates of mutants, and the omissions of a precision."""
    from moeverify.report.mutation import describe_left_out, describe_rates, summarize_mutants

    lines = [*summarize_mutants(ran.rows), "", *describe_rates(ran.rows)]
    if precision is not None:
        lines += describe_left_out(ran.rows, precision.value, ran.left_out)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _name_command(how: MutationOptions) -> str:
    """Return the command that reproduces the rows."""
    words = ["moeverify faults mutate", *(how.names or [f"--number {how.number} --seed {how.seed}"])]
    words += [] if how.precision is None else [f"--precision {how.precision}"]
    return " ".join(words if how.escalates else [*words, "--no-escalate"])


def _print_mutants(console: Console) -> None:
    """Print all mutants, one per line."""
    from moeverify.faults.mutation.mutant import list_mutants

    for mutant in list_mutants():
        line = f"{mutant.name}  {mutant.file}:{mutant.line}  {mutant.before} -> {mutant.after}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _conclude(verdicts: Sequence[str]) -> int:
    """Return the exit code of runs that should all pass; skipped runs are ignored."""
    codes = [EXIT_CODES.get(verdict, 0) for verdict in verdicts]
    return max(codes, default=0)


def _options(device: Device, cache: Path | None) -> RunOptions:
    from moeverify.verification.controller.options import RunOptions

    return RunOptions(device=device.value, cache_folder=cache, golden_folder=None)
