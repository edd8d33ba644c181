"""Lines from which a wrong result may come, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import shorten

from moeverify.results.culprit import CodeLine, Origin, OriginKind

LONGEST = 100
"""Maximum number of characters of an expression."""

# Relation of a line to the wrong result that may come from it.
_ORIGINS: Mapping[OriginKind, str] = {
    "branch": "one device does not execute it, and executes other lines of this function",
    "parallel": "one device executes other lines of this function, and runs no such collective or called function",
    "cut": "passes no gradient, unlike the same place on one device",
    "value": "its inputs match, and its values differ from those of one device",
    "extra": "one device does not run it, and its result is used here",
    "derivative": "computes a gradient before the wrong one, and one device does not run it",
    "part": "computes or passes on this rank's part of a sum",
    "missing": "right results of this kind pass this call, and this one does not",
    "member": "decides the inputs of that call",
    "alone": "right results of this kind do not pass this line, and this one does",
    "collective": "communicates an operand, or a value from which it comes",
    "condition": "decides whether that call runs",
    "definition": "defines a value that the operation takes",
    "made": "makes the tensor, or a weight from which it comes, before the first step",
    "entered": "calls this function, and one device does not run this line",
    "chosen": "decides which elements of the part are not zero",
    "repeated": "adds values that are equal on all of its ranks",
    "unused": "nothing uses the result of this collective",
    "overwrites": "writes over its own result of the same step, which nothing has read",
    "draw": "draws random numbers, and one device does not",
    "skipped": "one device executes the lines that depend on it, and no rank does",
    "configures": "configures the part of torch that runs the operation",
}


def list_origins(origins: Sequence[Origin]) -> list[str]:
    """Return one sentence for each line from which the wrong result may come."""
    return [f"{_name_origin(each)}: {describe_relation(each)}" for each in origins]


def _name_origin(origin: Origin) -> str:
    """Return the expression and line of an origin, and the lines that call its function."""
    lines = [line for line in (origin.caller, *origin.outer) if line is not None]
    calls = f", called from {', '.join(map(name_line, lines))}" if lines else ""
    return f"`{shorten(origin.line.expression, LONGEST)}`, {name_line(origin.line)}{calls}"


def describe_relation(origin: Origin) -> str:
    """Return the relation of a line to the wrong result that may come from it, with the values that it defines."""
    return _ORIGINS[origin.kind] + _compare_values(origin)


def _compare_values(origin: Origin) -> str:
    """Return the value that a line defines, next to the one of one device, or an empty string."""
    here = f": {shorten(origin.here, LONGEST)}" if origin.here else ""
    if origin.here is not None and origin.there is None:
        return f"{here}; one device does not run this line"
    return f"{here}; on one device {shorten(origin.there, LONGEST)}" if here and origin.there else ""


def describe_lone_line(origin: Origin, *, is_proved: bool = False) -> str:
    """Return the headline of a line that one side alone executes, with the value that it defines."""
    name, value = _name_origin(origin), f"; it gives {shorten(origin.here, LONGEST)}" if origin.here else ""
    if origin.kind == "skipped":
        return f"only lines before the first wrong result that ranks leave out: under {name}"
    if origin.kind == "unused":
        return f"nothing uses the result of a collective: {name}; another value of this function is used"
    if origin.there is not None:
        return f"first wrong number: {name}{value}, and {shorten(origin.there, LONGEST)} on one device"
    title = "first wrong line" if is_proved else "only line of ranks alone before the first wrong result"
    return f"{title}: {name}; one device does not execute it{value}"


def name_line(line: CodeLine) -> str:
    return f"{line.file}:{line.line}" + (
        f" in {line.function}" if line.function and line.function[0] != "<" else ""
    )
