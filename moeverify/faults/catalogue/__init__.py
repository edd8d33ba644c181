"""Catalogue of real bugs: one folder per class of bugs, and one file per fault, named after its number.

A file defines one `FAULT`. No module here imports torch before a fault is injected, so that listing is
fast.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from moeverify.faults.fault import Fault

_FAULT_FILE = re.compile(r"[a-p]\d\d_\w+")


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
    folders = [info.name for info in pkgutil.iter_modules(__path__) if info.ispkg]
    return tuple(sorted((_load_class(name) for name in folders), key=lambda found: found.letter))


def _load_class(name: str) -> FaultClass:
    """Import a folder of the catalogue: its `LETTER`, its faults, and its first docstring line as title."""
    folder: Any = importlib.import_module(f"{__name__}.{name}")
    files = sorted(info.name for info in pkgutil.iter_modules(folder.__path__))
    modules: list[Any] = [
        importlib.import_module(f"{folder.__name__}.{file}") for file in files if _FAULT_FILE.fullmatch(file)
    ]
    title = (folder.__doc__ or name).splitlines()[0].removesuffix(".")
    return FaultClass(folder.LETTER, name, title, tuple(module.FAULT for module in modules))


@cache
def load_faults() -> dict[str, Fault]:
    """Return all faults by number, sorted.

    Raises: ValueError when two faults have one number, or a fault is in the folder of another class.
    """
    found: dict[str, Fault] = {}
    for each in load_classes():
        for fault in each.faults:
            if fault.number in found:
                raise ValueError(f"two faults have the number {fault.number}")
            if fault.bug_class != each.letter:
                raise ValueError(f"{fault.number} is in `{each.name}`, the folder of class {each.letter}")
            found[fault.number] = fault
    return found
