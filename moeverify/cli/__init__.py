"""The command line: one thin file a command; what a command needs is imported when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from moeverify.cli.bench import bench
from moeverify.cli.check import check
from moeverify.cli.comm import comm
from moeverify.cli.compare import compare
from moeverify.cli.convert import convert
from moeverify.cli.diff import diff
from moeverify.cli.doctor import doctor
from moeverify.cli.explain import explain
from moeverify.cli.faults import faults
from moeverify.cli.golden import golden
from moeverify.cli.history import history
from moeverify.cli.mesh import mesh
from moeverify.cli.place import place
from moeverify.cli.report import report
from moeverify.cli.reshard import reshard
from moeverify.cli.route import route
from moeverify.cli.run import run
from moeverify.cli.schema import schema
from moeverify.cli.streams import standard_streams
from moeverify.cli.watch import watch
from moeverify.results.checks import CheckName

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


def _list_checks() -> str:
    """Return what `checks.skip`, `checks.differs` and `checks.also` of a case may name, a line each."""
    lines = (f"{name}: {name.description}{' (optional)' if name.is_optional else ''}" for name in CheckName)
    return "\b\nChecks that a case may skip, declare to differ, or ask for:\n" + "\n".join(lines)


_COMMANDS = (
    run,
    reshard,
    check,
    schema,
    golden,
    mesh,
    place,
    comm,
    route,
    bench,
    convert,
    doctor,
    report,
    explain,
    diff,
    history,
    watch,
    compare,
)
for _command in _COMMANDS:
    app.command(epilog=_list_checks() if _command is check else None)(_command)
app.add_typer(faults, name="faults")


def main() -> None:
    """Run the command line; the process ends with the exit code of the command."""
    with standard_streams():
        app(prog_name="moeverify")
