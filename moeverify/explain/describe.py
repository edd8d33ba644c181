"""Conversion of operators, values and source lines to records."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from moeverify.explain.joint import At, Joint
from moeverify.explain.program import BATCH, HIDDEN, Op, Program, Site, list_refs
from moeverify.explain.sites import is_own
from moeverify.results.culprit import CodeLine, Operation, SourceValue

_AROUND = 1
"""Number of lines shown before and after a call."""


def describe_op(program: Program, op: Op) -> Operation:
    """Return an operator with the lines that call it, the innermost caller with the lines around it."""
    found = describe_call(op.short, program.sites_of(op))
    derived = not op.sites and op.origin >= 0
    return found.model_copy(
        update={"module": op.module, "phase": op.phase, "step": op.step, "is_derivative": derived}
    )


def describe_call(name: str, sites: Sequence[Site]) -> Operation:
    """Return a call of an operator or function before the first step, with its lines."""
    callers = sites[1:] if sites and is_own(sites[0]) else [site for site in sites[1:] if not is_own(site)]
    return Operation(
        operator=name,
        line=make_line(sites[0]) if sites else None,
        callers=tuple(
            line if number == 0 else line.model_copy(update={"lines": ()})
            for number, line in enumerate(map(make_line, callers))
        ),
    )


def describe_at(joint: Joint, at: At) -> Operation:
    """Return an operator of a rank with the lines that call it."""
    return describe_op(joint.programs[at[0]], joint.op(at))


def describe_value(program: Program, number: int) -> SourceValue:
    """Return a value with its name, or with the operation that made it."""
    value = program.values[number]
    while value.alias >= 0 and not value.label:
        value = program.values[value.alias]
    op = program.ops[value.op]
    return SourceValue(
        label=value.label.removeprefix(BATCH), operation=describe_op(program, op), step=op.step
    )


def make_line(site: Site) -> CodeLine:
    """Return a call with its expression and the surrounding lines of the file."""
    shown = [
        (number, text.rstrip())
        for number in range(site.line - _AROUND, site.line + _AROUND + 1)
        if (text := linecache.getline(site.file, number))
    ]
    return CodeLine(
        file=shorten(site.file),
        line=site.line,
        function=site.function,
        expression=read_expression(site),
        lines=tuple(shown),
    )


def read_expression(site: Site) -> str:
    """Return the source code of a call on one line, or "" if it is unknown."""
    if site.span is None:
        return ""
    first, begin, last, end = site.span
    lines = [linecache.getline(site.file, number).encode() for number in range(first, last + 1)]
    if not all(lines):
        return ""
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    return " ".join(b" ".join(lines).decode(errors="replace").split())


def shorten(path: str) -> str:
    """Return a file's path relative to the folder that it is imported from."""
    return _shorten(path, (str(Path.cwd()), *sys.path))


@cache  # of the lines of a step, most are in the same files
def _shorten(path: str, folders: tuple[str, ...]) -> str:
    file = Path(path)
    roots = [Path(folder).resolve() for folder in folders]
    inside = [root for root in roots if file.is_relative_to(root)]
    return str(file.relative_to(max(inside, key=lambda each: len(each.parts)))) if inside else path


def list_differences(op: Op, other: Op | None) -> tuple[tuple[str, str], ...]:
    """Return the pairs of non-tensor arguments that differ between two calls of one operator."""
    if other is None:
        return ()
    pairs = list(zip(op.args, other.args, strict=False))
    pairs += [(op.kwargs.get(name), other.kwargs.get(name)) for name in {**op.kwargs, **other.kwargs}]
    return tuple(
        (str(mine), str(theirs))
        for mine, theirs in pairs
        if not (list(list_refs([mine, theirs])) or str(mine) == str(theirs))
    )


def name_of(source: SourceValue) -> object:
    """Return a key that is equal for values with the same name in a report."""
    line = source.operation.line if source.operation is not None else None
    return source.label or (line and (line.file, line.line, line.expression)), source.step


def join(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """Return the first operation of each source line."""
    found: dict[tuple[str, int], Operation] = {}
    for each in operations:
        if each.line is not None and each.operator not in HIDDEN:
            found.setdefault(line_of(each), each)
    return tuple(found.values())


def join_last(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """Return the last operation of each source line, which has the whole expression, in order."""
    return join(reversed(list(operations)))[::-1]


def line_of(operation: Operation) -> tuple[str, int]:
    """Return the file and line of an operation that has them."""
    assert operation.line is not None
    return operation.line.file, operation.line.line


def is_alike(op: Op, other: Op) -> bool:
    """Return whether two calls have the same operator and the same non-tensor arguments."""
    return op.short == other.short and not list_differences(op, other)


def list_numbers(op: Op, other: Op) -> list[tuple[str, str]]:
    """Return the numbers that differ between two calls of one operator.

    Sizes are left out: they depend on the layout.
    """
    if op.short != other.short:
        return []
    return [
        pair for pair in list_differences(op, other) if not any(each.startswith(("[", "(")) for each in pair)
    ]
