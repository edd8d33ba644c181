"""Numbers that a program reads from tensors into Python and later passes to operators."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from moeverify.explain.program import LEAF, Op, Program, list_numbers

_MOST_SIMPLE = 4096.0


def list_hidden_reads(program: Program, right: Collection[float] = ()) -> Mapping[int, int]:
    """Return the value from which a number among each operator's arguments was probably computed in Python.

    It is a tensor with the same number, or else the last tensor from which the same function read a number.
    The latter is a guess, and is not made for the numbers in `right`, which the single device uses too.
    Maps the number of the operator to the number of the value.
    """
    exact: dict[float, int] = {}
    last: dict[tuple[str, str], int] = {}
    found: dict[int, int] = {}
    for op in program.ops:
        if op.step < 0:
            continue
        if isinstance(op.scalar, float):
            source = next(op.refs(), None)
            if source is not None:
                exact[op.scalar] = source
                last |= dict.fromkeys(_functions(op), source)
            continue
        numbers = _list_telling(program, op)
        known = next((exact[number] for number in numbers if number in exact), None)
        if known is None and any(number not in right for number in numbers):
            known = next((last[function] for function in _functions(op) if function in last), None)
        if known is not None:
            found[op.number] = known
    return found


def list_constants(program: Program) -> frozenset[float]:
    """Return the numbers among the arguments of a program's operators that are unlikely to recur by chance."""
    return frozenset(number for op in program.ops for number in _list_telling(program, op))


def _functions(op: Op) -> list[tuple[str, str]]:
    return [(site.file, site.function) for site in op.sites]


def _list_telling(program: Program, op: Op) -> list[float]:
    """Return an operator's numbers that are unlikely constants: no integers or simple fractions."""
    if op.name == f"memory.{LEAF}":
        data = program.values[op.results[0]].data
        numbers = [float(data)] if data is not None and data.numel() == 1 and data.is_floating_point() else []
    else:
        numbers = [float(each) for each in list_numbers([*op.args, *op.kwargs.values()])]
    return [number for number in numbers if not (number * _MOST_SIMPLE).is_integer()]
