"""Limits on the arguments of all commands: finite numbers, 64-bit integers, and paths that a file system accepts."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from moeverify.input_file import LONGEST_NAME
from moeverify.report.sanitize import MOST_TEXT, clean, elide

_MOST_NUMBER = 1e12  # seconds, bytes or factors; products of two of them are finite
_MOST_INTEGER = (1 << 63) - 1
_LONGEST_PATH, _LONGEST_TEXT = 4095, 1 << 17  # bytes, on Linux


_RENAMED = {
    ("bench", "--steps"): "--iterations",
    ("comm", "--ranks"): "--world-size",
    ("init", "--set"): "--arg",
    ("place", "--nodes"): "--ranks-per-node",
    ("place", "--out"): "--save",
    ("place", "--ranks"): "--world-size",
    ("shrink", "--out"): "--save",
}


class BoundedCommand(TyperCommand):
    """A command whose arguments are checked against the limits before it runs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, and refuse a value beyond the limits as bad usage.

        Raises: typer.BadParameter, or another usage error of click.
        """
        try:
            rest = super().parse_args(ctx, args)
        except Exception as error:
            text = getattr(error, "message", None)
            if isinstance(text, str):  # of a usage error, which repeats the value; pydantic adds a prefix
                error.message = elide(clean(text.removeprefix("Value error, ")), MOST_TEXT)  # type: ignore[attr-defined]
            new = _RENAMED.get((self.name or "", getattr(error, "option_name", "")))
            if new is not None:
                error.possibilities = [new]  # type: ignore[attr-defined]
            raise
        for param in self.params:
            problem = find_problem(ctx.params.get(param.name))
            if problem:
                raise typer.BadParameter(problem, ctx=ctx, param=param)  # type: ignore[arg-type]
        return rest


def find_problem(value: Any) -> str:
    """Return which limit a parsed value exceeds, or an empty string."""
    if isinstance(value, list | tuple):
        return next(filter(None, map(find_problem, value)), "")
    if isinstance(value, float):
        is_fine = math.isfinite(value) and abs(value) <= _MOST_NUMBER
        return "" if is_fine else f"{value} is not a number from -{_MOST_NUMBER:g} to {_MOST_NUMBER:g}"
    if isinstance(value, int):
        return "" if abs(value) <= _MOST_INTEGER else "an integer beyond 64 bits"
    return _find_problem_of_text(value) if isinstance(value, str | Path) else ""


def _find_problem_of_text(value: str | Path) -> str:
    size = len(os.fsencode(value))
    if "\0" in str(value):
        return "it contains a null byte"
    if size > _LONGEST_TEXT:
        return f"it has {size} bytes, and at most {_LONGEST_TEXT} are read"
    if not isinstance(value, Path):
        return ""
    if size > _LONGEST_PATH:
        return f"a path of {size} bytes, and at most {_LONGEST_PATH} are possible"
    longest = max((len(os.fsencode(part)) for part in value.parts), default=0)
    return (
        f"a name of {longest} bytes, and at most {LONGEST_NAME} are possible"
        if longest > LONGEST_NAME
        else ""
    )
