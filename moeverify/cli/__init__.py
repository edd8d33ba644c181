"""The command line: a thin door, one file a command; what a command needs is imported when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from moeverify.cli.bench import bench
from moeverify.cli.check import check
from moeverify.cli.convert import convert
from moeverify.cli.diff import diff
from moeverify.cli.doctor import doctor
from moeverify.cli.explain import explain
from moeverify.cli.faults import faults
from moeverify.cli.golden import golden
from moeverify.cli.mesh import mesh
from moeverify.cli.place import place
from moeverify.cli.report import report
from moeverify.cli.reshard import reshard
from moeverify.cli.run import run

app = typer.Typer(
    help="Verify that a distributed Mixture-of-Experts training run computes what a single device computes.",
    epilog="Exit codes: 0 pass, 1 mismatch, 2 bad case or usage, 3 a rank failed or hung.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # boxes leave a third of 80 columns for the text
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(is_asked: bool) -> None:
    """Print the version and end, when it was asked for."""
    if is_asked:
        from importlib.metadata import PackageNotFoundError, version

        try:
            number = version("moeverify")
        except PackageNotFoundError:
            number = "(not installed)"
        typer.echo(f"moeverify {number}")
        raise typer.Exit


@app.callback()
def _main(
    _version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Verify that a distributed Mixture-of-Experts training run computes what a single device computes."""


_COMMANDS = (run, reshard, check, golden, mesh, place, bench, convert, doctor, report, explain, diff)
for _command in _COMMANDS:
    app.command()(_command)
app.add_typer(faults, name="faults")


def main() -> None:
    """Run the command line; the process ends with the exit code of the command."""
    app(prog_name="moeverify")
