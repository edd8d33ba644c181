"""The command line, one thin module per command; a command imports its dependencies when it runs."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from moeverify.cli.answering import AnsweringCommand, TextCommand, usage_answered
from moeverify.cli.streams import standard_streams

_FEW_COLLECTIONS = 100_000

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "Verify": ("init", "run", "shrink", "bisect", "reshard", "check", "schema", "golden"),
    "Look at a run": ("report", "explain", "operators", "diff", "history"),
    "Training scripts": ("watch", "compare"),
    "Layouts and routing": ("mesh", "place", "comm", "route"),
    "Tools": ("bench", "convert", "doctor", "faults", "serve", "skill"),
}
"""The commands in the order of `--help`. The function or typer app of each has the name of its module."""

COMMANDS = tuple(name for names in SECTIONS.values() for name in names)

EXAMPLES: Mapping[str, str] = {
    "init": "init my_gpt.model:make",
    "run": "run cases/fsdp2-ep2.yaml --html report.html",
    "shrink": "shrink cases/tp.yaml --fault my_faults:forget_norms",
    "bisect": "bisect v1.0..HEAD -- verify/tp.yaml",
    "reshard": "reshard cases/fsdp2.yaml cases/tp.yaml",
    "check": "check cases",
    "schema": "schema > case.schema.json",
    "golden": "golden cases --check",
    "report": "report runs/ep2 --html report.html",
    "explain": "explain runs/ep2 1",
    "operators": "operators runs/ep2 --html operators.html",
    "diff": "diff runs/before runs/after",
    "history": "history runs",
    "watch": "watch --out runs/ep2 -- torchrun --nproc-per-node 2 train.py",
    "compare": "compare runs/one runs/ep2",
    "mesh": "mesh cases/hsdp-cp-ep.yaml --ranks-per-node 4",
    "place": "place load.trace --world-size 8 --slots 9",
    "comm": "comm all_to_all --world-size 4 --backward",
    "route": "route cases/ep2.yaml --tokens 8",
    "bench": "bench cases/ep2.yaml --sweep layout.micro_batches=1,2",
    "convert": "convert Mixtral-8x7B weights --to dcp",
    "doctor": "doctor",
    "faults": "faults run A05",
    "faults list": "faults list -k router",
    "faults show": "faults show A05",
    "faults run": "faults run A05 --markdown faults.md",
    "faults clean": "faults clean -k 'bfloat16 and tp-ep'",
    "faults mutate": "faults mutate --number 20 --keep mutants.jsonl",
    "serve": "serve --idle 3600",
    "skill": "skill > SKILL.md",
}
"""One command line for the `--help` of each command and subcommand."""


# The commands without `--json`.
_TEXTS = ("explain", "schema", "serve", "skill", "watch")


class _Sections(TyperGroup):
    """The commands of `--help` by section; bad usage of any of them is answered in JSON, if asked for."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options before the command."""
        ctx.meta[__name__] = tuple(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Parse the rest, and run the command."""
        with usage_answered(ctx.meta[__name__]):
            return super().invoke(ctx)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a list of commands for each section."""
        for title, names in SECTIONS.items():
            found = [(name, self.commands[name]) for name in names if name in self.commands]
            if found:
                limit = formatter.width - 6 - max(len(name) for name, _ in found)
                with formatter.section(title):
                    formatter.write_dl([(name, each.get_short_help_str(limit)) for name, each in found])


def build_app(commands: Sequence[str] = COMMANDS) -> typer.Typer:
    """Return the typer app with these commands; only their modules are imported."""
    app = typer.Typer(
        help="Verify that a distributed Mixture-of-Experts training run computes what a single device computes.",
        cls=_Sections,
        epilog="Exit codes: 0 pass, 1 mismatch, 2 bad case or usage, 3 a rank failed or hung, 4 undecided.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,  # boxes leave a third of 80 columns for the text
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_main)
    for name in commands:
        command = getattr(importlib.import_module(f"moeverify.cli.{name}"), name)
        if isinstance(command, typer.Typer):
            for each in command.registered_commands:
                each.cls = AnsweringCommand
                each.epilog = _show_example(f"{name} {each.name}")
            app.add_typer(command, name=name, epilog=_show_example(name))
        else:
            epilog = _show_example(name) + (f"\n\n{_list_checks()}" if name == "check" else "")
            app.command(cls=TextCommand if name in _TEXTS else AnsweringCommand, epilog=epilog)(command)
    return app


def _show_example(name: str) -> str:
    return f"\b\nExample: moeverify {EXAMPLES[name]}"


def main() -> None:
    """Run the command line; the process ends with the exit code of the command."""
    # Imported modules stay alive. Repeated searches for cycles in them take a tenth of the shorter
    # commands.
    gc.set_threshold(_FEW_COLLECTIONS)
    with standard_streams():
        asked = tuple(name for name in sys.argv[1:2] if name in COMMANDS)
        build_app(asked or COMMANDS)(prog_name="moeverify")


def _show_version(is_asked: bool) -> None:
    """Print the version and exit, if requested."""
    if is_asked:
        from importlib.metadata import PackageNotFoundError, version

        try:
            number = version("moeverify")
        except PackageNotFoundError:
            number = "(not installed)"
        typer.echo(f"moeverify {number}")
        raise typer.Exit


def _main(
    _version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Verify that a distributed Mixture-of-Experts training run computes what a single device computes."""


def _list_checks() -> str:
    """Return one line per check that `checks.skip`, `checks.differs` and `checks.also` accept."""
    from moeverify.results.checks import CheckName

    lines = (f"{name}: {name.description}{' (optional)' if name.is_optional else ''}" for name in CheckName)
    return "\b\nChecks that a case may skip, declare to differ, or ask for:\n" + "\n".join(lines)
