"""Cases and faults as commands list them that run nothing. No torch."""

from __future__ import annotations

from moeverify.results.record import Record


class CheckedCase(Record):
    """A valid case, with its layout and recipe in words."""

    name: str
    file: str
    ranks: int
    layout: str
    recipe: str


class CheckedCases(Record):
    """The facts of `moeverify check`."""

    cases: tuple[CheckedCase, ...]


class ListedFault(Record):
    """A fault of the catalogue; `group` is the name of its class."""

    number: str
    group: str
    title: str
    source: str
    mechanism: str
    trigger: str


class ListedFaults(Record):
    """The facts of `moeverify faults list` and `faults show`."""

    faults: tuple[ListedFault, ...]
