"""Undo of direct assignments by a fault without a patch, such as `plan.parallelize = own`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

Holder = ModuleType | type
Change = tuple[Holder, str, Any]

ABSENT: Any = object()


@contextmanager
def assignments_undone(function: Callable[[], object]) -> Iterator[None]:
    """Call a function, and undo its assignments to modules and classes when the block ends.

    Python has no hook for assignments to a module. All loaded modules and their classes are therefore
    compared before and after the call (0.1 s with torch loaded). Only assignments during the call are
    undone, not later ones by training.
    """
    before = [(holder, dict(vars(holder))) for holder in list_holders()]
    changes: list[Change] = []
    try:
        try:
            function()
        finally:
            changes += find_changes(before)
        yield
    finally:
        for holder, name, value in changes:
            if value is ABSENT:
                delattr(holder, name)
            else:
                setattr(holder, name, value)


def list_holders() -> Iterator[Holder]:
    """Yield every loaded module, and every class in the module that defines it."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            yield module
            for value in list(vars(module).values()):
                # Not isinstance: some torch objects emit warnings when `__class__` is read.
                if issubclass(type(value), type) and value.__module__ == module.__name__:
                    yield value


def find_changes(before: list[tuple[Holder, dict[str, Any]]]) -> Iterator[Change]:
    for holder, attributes in before:
        now = dict(vars(holder))
        for name in attributes.keys() | now.keys():
            old, new = attributes.get(name, ABSENT), now.get(name, ABSENT)
            if old is not new and _is_assignment(holder, new):
                yield holder, name, old


def _is_assignment(holder: Holder, value: Any) -> bool:
    """Return whether a fault set this value. Imports also set modules, caches and counters."""
    if isinstance(holder, ModuleType):
        is_ours = f"{holder.__name__}.".startswith("moeverify.")
    else:
        is_ours = holder.__module__.startswith("moeverify.")
    return (is_ours or callable(value)) and not isinstance(value, ModuleType)
