"""`moeverify faults`: the benchmark of real bugs, and the clean runs that must raise no alarm."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeverify.cli.arguments import CacheFolder, Device, DeviceOption, Quiet
from moeverify.cli.door import open_door

if TYPE_CHECKING:
    from moeverify.faults.fault import Fault
    from moeverify.suite.options import RunOptions

faults = typer.Typer(help="The benchmark of real bugs: list, show, run; and clean runs that must pass.")

Numbers = Annotated[
    list[str] | None, typer.Argument(metavar="[NUMBER]...", help="Faults by number; all if left out.")
]
Output = Annotated[
    Path | None, typer.Option("--markdown", metavar="FILE", help="Write the table as Markdown too.")
]


@faults.command("list")
def list_faults() -> None:
    """List all faults, one a line."""
    with open_door() as door:
        from moeverify.faults.fault import load_faults

        for fault in load_faults().values():
            door.out.print(f"{fault.number}  {fault.title}  [{fault.source}]", markup=False, highlight=False)


@faults.command("show")
def show(numbers: Annotated[list[str], typer.Argument(metavar="NUMBER...")]) -> None:
    """Show where a fault comes from, what it does, and how to run a case with it."""
    with open_door() as door:
        from moeverify.case.describe import describe_layout
        from moeverify.faults.fault import find_fault

        for number in numbers:
            fault = find_fault(number)
            causes = " or ".join(cause.value for cause in fault.expected.causes)
            lines = [
                f"{fault.number}: {fault.title}",
                f"  source     {fault.source}",
                f"  mechanism  {fault.mechanism}",
                f"  trigger    {fault.trigger}",
                f"  case       {describe_layout(fault.case.layout)}",
                f"  expected   {causes}, at {fault.expected.where}",
                f"  inject     moeverify run CASE --fault {fault.target}",
            ]
            if fault.notes:
                lines.append(f"  notes      {fault.notes}")
            door.out.print("\n".join(lines), markup=False, highlight=False)


@faults.command("run")
def run(
    numbers: Numbers = None,
    *,
    markdown: Output = None,
    device: DeviceOption = Device.auto,
    cache: CacheFolder = None,
    quiet: Quiet = False,
) -> None:
    """Inject faults, one run each, and say which were detected, located and named.

    Exit code 1 when a fault was not detected.
    """
    with open_door() as door:
        from moeverify.report.faults import render_faults, write_faults
        from moeverify.report.progress import open_progress
        from moeverify.suite.faults import run_faults
        from moeverify.suite.machine import describe_environment

        chosen = _choose(numbers)
        with open_progress(door.out, quiet=quiet) as progress:
            rows = run_faults(chosen, _options(device, cache), progress.on_event)
        render_faults(rows, door.out)
        if markdown is not None:
            command = " ".join(["moeverify faults run", *(numbers or [])])
            markdown.write_text(write_faults(rows, describe_environment(device.value), command))
        raise typer.Exit(0 if all(row.detected for row in rows) else 1)


@faults.command("clean")
def clean(
    *,
    num_seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many seeds for each setting.")] = 1,
    markdown: Output = None,
    device: DeviceOption = Device.auto,
    cache: CacheFolder = None,
    quiet: Quiet = False,
) -> None:
    """Run clean cases over layouts, precisions, recipes and seeds; every alarm is a false one.

    Exit code 1 when there was an alarm.
    """
    with open_door() as door:
        from moeverify.report.faults import summarize_clean, write_clean
        from moeverify.report.progress import open_progress
        from moeverify.suite.clean import run_clean
        from moeverify.suite.machine import describe_environment

        with open_progress(door.out, quiet=quiet) as progress:
            rows = run_clean(num_seeds, _options(device, cache), progress.on_event)
        for line in summarize_clean(rows):
            door.out.print(line, markup=False, highlight=False)
        if markdown is not None:
            command = f"moeverify faults clean --seeds {num_seeds}"
            markdown.write_text(write_clean(rows, describe_environment(device.value), command))
        raise typer.Exit(0 if all(row.verdict == "pass" for row in rows) else 1)


def _choose(numbers: list[str] | None) -> list[Fault]:
    from moeverify.faults.fault import find_fault, load_faults

    return [find_fault(number) for number in numbers] if numbers else list(load_faults().values())


def _options(device: Device, cache: Path | None) -> RunOptions:
    from moeverify.suite.options import RunOptions

    nowhere = Path("golden", "of-faults")  # no goldens are recorded for these cases
    return RunOptions(device=device.value, cache_folder=cache, golden_folder=nowhere)
