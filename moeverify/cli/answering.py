"""Commands with `--json`: the option, and the answer to bad usage, in one place for all of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from moeverify.cli.arguments import file_of_format
from moeverify.cli.bounds import BoundedCommand
from moeverify.cli.context import BAD_INPUT, find_rank
from moeverify.cli.reply import Reply, replying
from moeverify.errors import CaseError, Problem

# A class of click, of which some versions of typer have a copy.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


class AnsweringCommand(BoundedCommand):
    """A command with a reply and the option `--json`, which is added unless it is one of the command's formats."""

    has_file = True

    def __init__(self, *positional: Any, params: Sequence[Any] = (), **named: Any) -> None:
        self._is_added = self.has_file and not any(param.name == "json" for param in params)
        added = [_json_option()] if self._is_added else []
        super().__init__(*positional, params=[*params, *added], **named)

    def invoke(self, ctx: Any) -> Any:
        """Run the command with its reply."""
        named = ctx.params.pop("json") if self._is_added else ctx.params.get("json")
        file = None if named is None else Path(named)  # older versions of typer convert it in the call alone
        is_brief = ctx.params.get("json_brief", False)
        with replying(Reply(_name_command(ctx), file, is_brief=is_brief, is_format=not self._is_added)):
            return super().invoke(ctx)


class TextCommand(AnsweringCommand):
    """A command without `--json`: its output is a text, or already a file for programs."""

    has_file = False


@functools.cache
def _json_option() -> Any:
    app = typer.Typer(add_completion=False)

    @app.command()
    def declare(
        json: Annotated[Path | None, file_of_format("json")] = None,
    ) -> None:
        """Declare the option; typer makes it."""

    return typer.main.get_command(app).params[0]


@contextmanager
def usage_answered(words: Sequence[str]) -> Iterator[None]:
    """Answer bad usage in the body in JSON, if the words of the command line ask for it.

    No command runs then, and no option was read.
    """
    try:
        yield
    except _UsageError as raised:
        error: Any = raised
        own = words[: words.index("--")] if "--" in words else words
        reply = Reply(_name_command(error.ctx), _find_file(own), is_brief="--json-brief" in own)
        reply.advise([*reply.command.split(), "--help"], "the arguments and options")
        remedy = f"`{reply.next[0][0]}` lists the arguments and options"
        problem = Problem(error.format_message(), path=_name_parameter(error), remedy=remedy)
        with suppress(OSError, CaseError):
            if find_rank() == 0:
                reply.check()
                reply.write(BAD_INPUT, CaseError([problem]))
        raise


def _name_command(ctx: Any) -> str:
    """Return the name of a command without that of the program."""
    return str(ctx.command_path).partition(" ")[2] if ctx is not None else ""


def _name_parameter(error: Any) -> str:
    """Return the option or argument that an error of usage is about, as `--help` shows it; empty if unknown."""
    param = getattr(error, "param", None)
    if param is None:
        return str(getattr(error, "option_name", ""))
    name = max(param.opts, key=len)
    return str(name if name.startswith("-") else param.metavar or name)


def _find_file(words: Sequence[str]) -> Path | None:
    """Return the file of `--json` on a command line, if any."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        value = value if equals else following
        if name == "--json" and value and not value.startswith("-"):
            return Path(value)
    return None
