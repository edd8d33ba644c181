"""Operations with variants: `pick("carry")` is the one of the active topology."""

from __future__ import annotations

from collections.abc import Callable

from rowan.topology import here

_OPS: dict[str, dict[str, Callable]] = {}


def op(name: str, variant: str = "") -> Callable[[Callable], Callable]:
    """Register a function as an operation, or as a variant of it."""

    def keep(function: Callable) -> Callable:
        _OPS.setdefault(name, {})[variant] = function
        return function

    return keep


def pick(name: str) -> Callable:
    table = _OPS[name]
    return table.get(here().quirk, table[""])
