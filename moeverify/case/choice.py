"""A field of the schema that chooses between implementations, and where each of them is found.

The options are spelled once, in the schema. Each is implemented by a module of its own, which is called as the option
is, or by a row of a table. Either way `moeverify check` can ask for its rules: torch is imported when it computes.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, get_args, get_type_hints

from moeverify.case.fields import Section
from moeverify.case.rule import Rule, blame
from moeverify.case.schema import Case
from moeverify.case.suggest import enumerate_names
from moeverify.errors import Problem
from moeverify.results.obstacle import Obstacle

T = TypeVar("T")
R = TypeVar("R", bound="Row")
T_co = TypeVar("T_co", covariant=True)


class Implementation:
    """What every option may say of itself, beside what its own choice asks of it.

    `rules` are tried only where a case chooses the option.
    """

    rules: tuple[Rule, ...] = ()

    def find_obstacle(self, case: Case, device: str, backend: str) -> Obstacle | None:
        """Return why this case cannot run on this machine although it is valid, or nothing.

        `backend`, gloo or nccl, carries the collectives of tensors on `device`, cpu or cuda.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class Row(Implementation):
    """An option that is all facts and needs no code of its own: a row of a table. `meaning` is a sentence."""

    meaning: str
    rules: tuple[Rule, ...] = ()


class Choice(Protocol[T_co]):
    """The options of one field; `path` is that of the field in a case file, such as `layout.context_parallel`."""

    @property
    def path(self) -> str:
        """Return the dotted path of the field."""

    def find(self, option: str) -> T_co:
        """Return the implementation of an option.

        Raises: KeyError where it has none.
        """

    def locate(self, option: str) -> str:
        """Return where the implementation of an option is, or would have to be."""

    def explain(self, option: str) -> str:
        """Return what an option means, in a sentence."""

    def has(self, option: str) -> bool:
        """Return whether an option has an implementation."""


@dataclass(frozen=True)
class Modules(Generic[T]):
    """A choice whose options are modules of `package`, each with its `IMPLEMENTATION`."""

    path: str
    package: str

    def find(self, option: str) -> T:
        """Return the implementation of an option; see `Choice`."""
        if not self.has(option):
            raise KeyError(f"{self.path} `{option}` has no implementation {self.locate(option)}")
        found: T = importlib.import_module(f"{self.package}.{option}").IMPLEMENTATION
        return found

    def locate(self, option: str) -> str:
        """Return the file of an option."""
        return f"{self.package.replace('.', '/')}/{option}.py"

    def explain(self, option: str) -> str:
        """Return the first line of the module's docstring."""
        self.find(option)
        module = importlib.import_module(f"{self.package}.{option}")
        return (module.__doc__ or "").partition("\n")[0]

    def has(self, option: str) -> bool:
        """Return whether there is a module for an option."""
        return importlib.util.find_spec(f"{self.package}.{option}") is not None


@dataclass(frozen=True)
class Table(Generic[R]):
    """A choice whose options are rows of a table, which stands in the module `home`."""

    path: str
    home: str
    rows: Mapping[str, R]

    def find(self, option: str) -> R:
        """Return the row of an option; see `Choice`."""
        if option not in self.rows:
            raise KeyError(f"{self.path} `{option}` has no implementation {self.locate(option)}")
        return self.rows[option]

    def locate(self, option: str) -> str:
        """Return the file with the table."""
        return f"{self.home.replace('.', '/')}.py"

    def explain(self, option: str) -> str:
        """Return what the row says of itself."""
        return self.find(option).meaning

    def has(self, option: str) -> bool:
        """Return whether the table has a row for an option."""
        return option in self.rows


def list_options(path: str) -> tuple[str, ...]:
    """Return the options that the schema has for the field at a path."""
    section: type[Section] = Case
    *around, name = path.split(".")
    for part in around:
        section = get_type_hints(section)[part]
    return get_args(get_type_hints(section)[name])


def chosen_option(case: Case, choice: Choice[Any]) -> str:
    """Return the option that a case chooses."""
    found: Any = case
    for part in choice.path.split("."):
        found = getattr(found, part)
    return str(found)


def report_missing(case: Case, choice: Choice[Any]) -> Problem | None:
    """Return the problem of a case that chooses what the schema knows and nobody has implemented, or None."""
    option = chosen_option(case, choice)
    if choice.has(option):
        return None
    known = [other for other in list_options(choice.path) if choice.has(other)]
    message = f"`{option}` has no implementation: it would be in {choice.locate(option)}"
    return blame(choice.path, message, f"choose from {enumerate_names(known)}, or write it")
