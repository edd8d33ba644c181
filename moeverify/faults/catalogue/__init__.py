"""Catalogue of real bugs: one module per class of bugs. A fault is its injection, decorated with its truth.

No module here imports torch before a fault is injected, so that listing is fast.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from functools import cache

from moeverify.faults.fault import Fault


@dataclass(frozen=True)
class FaultClass:
    """A class of bugs. Its letter is the prefix of the numbers of its faults."""

    letter: str
    name: str
    title: str
    faults: tuple[Fault, ...]


@cache
def load_classes() -> tuple[FaultClass, ...]:
    """Return all classes ordered by letter, each with its faults ordered by number."""
    names = [info.name for info in pkgutil.iter_modules(__path__)]
    return tuple(sorted((_load_class(name) for name in names), key=lambda found: found.letter))


def _load_class(name: str) -> FaultClass:
    """Import a module of the catalogue: its faults, and its first docstring line as title."""
    module = importlib.import_module(f"{__name__}.{name}")
    faults = [value for value in vars(module).values() if isinstance(value, Fault)]
    title = (module.__doc__ or name).splitlines()[0].removesuffix(".")
    return FaultClass(faults[0].bug_class, name, title, tuple(sorted(faults, key=lambda each: each.number)))


@cache
def load_faults() -> dict[str, Fault]:
    """Return all faults by number, sorted.

    Raises: ValueError when two faults have one number, or a fault is in the module of another class.
    """
    found: dict[str, Fault] = {}
    for each in load_classes():
        for fault in each.faults:
            if fault.number in found:
                raise ValueError(f"two faults have the number {fault.number}")
            if fault.bug_class != each.letter:
                raise ValueError(f"{fault.number} is in `{each.name}`, the module of class {each.letter}")
            found[fault.number] = fault
    return found
