"""Groups of options: a command that takes a group has all of its options and receives them as one value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from moeverify.cli import SECTIONS, build_app
from moeverify.cli.options import OptionGroup, with_groups
from moeverify.cli.outputs import Outputs
from moeverify.report.formats.registry import FORMATS
from moeverify.results.run import RunResult
from moeverify.verification.controller import run
from moeverify.verification.controller.options import RunOptions

COMMANDS: dict[str, Any] = typer.main.get_command(build_app()).commands  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Paint(OptionGroup):
    """What to paint, and how."""

    thing: Annotated[str, typer.Argument(metavar="THING", help="What to paint.")]
    colour: Annotated[str, typer.Option("--colour", help="In which colour.")] = "red"


@pytest.fixture
def seen() -> list[Any]:
    return []


@pytest.fixture
def paint(seen: list[Any]) -> typer.Typer:
    program = typer.Typer(rich_markup_mode=None)

    @program.command()
    @with_groups
    def main(
        *,
        paint: Paint,
        outputs: Outputs,
        twice: Annotated[bool, typer.Option("--twice", help="Paint it twice.")] = False,
    ) -> None:
        """Paint something."""
        seen.extend([paint, outputs, twice])

    return program


def test_a_group_is_given_with_what_the_user_wrote(paint: typer.Typer, seen: list[Any]) -> None:
    words = ["door", "--colour", "blue", "--twice", "--html", "a.html"]
    assert CliRunner().invoke(paint, words).exit_code == 0
    assert seen == [Paint("door", "blue"), Outputs({"html": Path("a.html")}), True]


def test_a_group_has_its_defaults(paint: typer.Typer, seen: list[Any]) -> None:
    assert CliRunner().invoke(paint, ["door"]).exit_code == 0
    assert seen == [Paint("door"), Outputs(), False]


def test_the_options_of_groups_are_in_the_help_in_their_order(paint: typer.Typer) -> None:
    text = CliRunner().invoke(paint, ["--help"]).stdout
    places = [text.index(word) for word in ("THING", "--colour", "--json", "--twice")]
    assert places == sorted(places)


def test_the_help_lists_each_command_in_its_section() -> None:
    text, _, _ = CliRunner().invoke(build_app(), ["--help"]).stdout.partition("Exit codes")
    lines = text.splitlines()
    found: dict[str, list[str]] = {}
    for line in lines[lines.index("Verify:") :]:
        if line.endswith(":") and not line.startswith(" "):
            names = found.setdefault(line.removesuffix(":"), [])
        elif line.strip():
            names.append(line.split()[0])
    assert {title: tuple(names) for title, names in found.items()} == dict(SECTIONS)


def list_commands(group: Any, prefix: str = "moeverify") -> Iterator[tuple[str, Any]]:
    """Yield every command and subcommand with its full name."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from list_commands(command, f"{prefix} {name}")
        else:
            yield f"{prefix} {name}", command


def describe_meaning(option: Any) -> dict[str, Any]:
    """Return all of an option that has to be equal in the commands that share its name; defaults may differ."""
    # Newer versions of typer have a description of the type, whose annotation includes that of a list.
    kind = option.type_descriptor.annotation if hasattr(option, "type_descriptor") else repr(option.type)
    fields = ("opts", "secondary_opts", "help", "metavar", "nargs", "multiple", "is_flag", "count")
    limits = {name: getattr(option, name, None) for name in ("min", "max")}
    return {"type": kind, **limits, **{name: getattr(option, name) for name in fields}}


def test_an_option_of_several_commands_has_one_meaning() -> None:
    found: dict[str, list[tuple[dict[str, Any], str]]] = {}
    for command_name, command in list_commands(typer.main.get_command(build_app())):
        for option in command.params:
            for name in (*option.opts, *option.secondary_opts) if option.param_type_name == "option" else ():
                meanings = found.setdefault(name, [])
                if all(meaning != describe_meaning(option) for meaning, _ in meanings):
                    meanings.append((describe_meaning(option), command_name))
    assert len(found) > 80
    assert {name: meanings for name, meanings in found.items() if len(meanings) > 1} == {}


@pytest.mark.parametrize(
    ("words", "new"),
    [
        (("bench", "--steps", "3"), "--iterations"),
        (("comm", "all_reduce", "--ranks=2"), "--world-size"),
        (("init", "a:b", "--set", "c=1"), "--arg"),
        (("place", "a.npy", "--nodes", "2"), "--ranks-per-node"),
        (("shrink", "a.yaml", "--out", "b.yaml"), "--save"),
    ],
)
def test_the_error_about_an_earlier_name_of_an_option_has_the_name_of_today(
    invoke: Any, words: tuple[str, ...], new: str
) -> None:
    told = invoke(*words)
    assert (told.exit_code, told.stdout) == (2, "")
    assert new in told.stderr
    assert new in {name for option in COMMANDS[words[0]].params for name in option.opts}


@pytest.mark.parametrize("command", ["run", "reshard", "report"])
def test_every_format_is_an_option_with_the_help_of_the_format(command: str) -> None:
    options = {name: option for option in COMMANDS[command].params for name in option.opts}
    for each in FORMATS:
        assert options[f"--{each.name}"].help == each.help


@pytest.mark.parametrize(("words", "seconds"), [((), 60.0), (("--explain-seconds", "2.5"), 2.5)])
def test_the_search_for_the_first_wrong_operation_has_its_time(
    invoke: Any,
    monkeypatch: pytest.MonkeyPatch,
    case_file: Path,
    words: tuple[str, ...],
    seconds: float,
) -> None:
    asked: list[RunOptions] = []

    def run_cases(cases: Any, options: RunOptions, on_event: Any) -> RunResult:
        asked.append(options)
        return RunResult(verdict="pass", environment={}, started="", seconds=1.0, launches=1, cases=())

    monkeypatch.setattr(run, "run_cases", run_cases)
    assert invoke("run", case_file, *words).exit_code == 0
    assert [options.explain_seconds for options in asked] == [seconds]


@pytest.mark.parametrize("word", ["-1", "nan", "inf", "soon"])
def test_a_time_that_is_none_is_refused(invoke: Any, case_file: Path, word: str) -> None:
    told = invoke("run", case_file, "--explain-seconds", word)
    assert (told.exit_code, told.stdout) == (2, "")
    assert "Invalid value for '--explain-seconds': Input should be" in told.stderr
