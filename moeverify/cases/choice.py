"""Fields of the schema that choose between implementations, and the location of each implementation.

The schema lists the options once. Each option is implemented by a module with the name of the option, or by
a row of a table. `moeverify check` can read the rules of both, because torch is imported only when an
implementation computes.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, get_args, get_type_hints

from moeverify.cases.fields import Section
from moeverify.cases.rule import Rule, blame
from moeverify.cases.schema import Case
from moeverify.cases.suggest import enumerate_names
from moeverify.errors import Problem
from moeverify.results.obstacle import Obstacle

T = TypeVar("T")
R = TypeVar("R", bound="Row")
T_co = TypeVar("T_co", covariant=True)


class Implementation:
    """Base class of all options. Each choice adds its own interface.

    `rules` apply only to cases that choose the option.
    """

    rules: tuple[Rule, ...] = ()

    def find_obstacle(self, case: Case, device: str, backend: str) -> Obstacle | None:
        """Return why this valid case cannot run on this machine, or None.

        `backend` ("gloo" or "nccl") is used for the collectives of tensors on `device` ("cpu" or "cuda").
        """
        return None


@dataclass(frozen=True, kw_only=True)
class Row(Implementation):
    """An option without code of its own: a row of a table. `meaning` is a sentence."""

    meaning: str
    rules: tuple[Rule, ...] = ()


class FieldOptions(Protocol[T_co]):
    """The options of one field of a case file.

    `path` is its dotted path, such as `layout.context_parallel`.
    """

    @property
    def path(self) -> str:
        """Return the dotted path of the field."""

    def find(self, option: str) -> T_co:
        """Return the implementation of an option.

        Raises: KeyError when it has none.
        """

    def locate(self, option: str) -> str:
        """Return the path of the file that implements an option, or that would have to."""

    def explain(self, option: str) -> str:
        """Return the meaning of an option as a sentence."""

    def has(self, option: str) -> bool:
        """Return whether an option has an implementation."""


@dataclass(frozen=True)
class Modules(Generic[T]):
    """A choice whose options are modules of `package`, each with an attribute `IMPLEMENTATION`."""

    path: str
    package: str

    def find(self, option: str) -> T:
        """Return the implementation of an option; see `FieldOptions`."""
        if not self.has(option):
            raise KeyError(f"{self.path} `{option}` has no implementation {self.locate(option)}")
        found: T = importlib.import_module(f"{self.package}.{option}").IMPLEMENTATION
        return found

    def locate(self, option: str) -> str:
        """Return the path of the module of an option."""
        return f"{self.package.replace('.', '/')}/{option}.py"

    def explain(self, option: str) -> str:
        """Return the first line of the module's docstring."""
        self.find(option)
        module = importlib.import_module(f"{self.package}.{option}")
        return (module.__doc__ or "").partition("\n")[0]

    def has(self, option: str) -> bool:
        return importlib.util.find_spec(f"{self.package}.{option}") is not None


@dataclass(frozen=True)
class Table(Generic[R]):
    """A choice whose options are rows of a table in the module `home`."""

    path: str
    home: str
    rows: Mapping[str, R]

    def find(self, option: str) -> R:
        """Return the row of an option; see `FieldOptions`."""
        if option not in self.rows:
            raise KeyError(f"{self.path} `{option}` has no implementation {self.locate(option)}")
        return self.rows[option]

    def locate(self, option: str) -> str:
        """Return the path of the file with the table."""
        return f"{self.home.replace('.', '/')}.py"

    def explain(self, option: str) -> str:
        """Return the meaning stored in the row."""
        return self.find(option).meaning

    def has(self, option: str) -> bool:
        return option in self.rows


def list_options(path: str) -> tuple[str, ...]:
    """Return the options that the schema defines for the field at a dotted path."""
    section: type[Section] = Case
    *around, name = path.split(".")
    for part in around:
        section = get_type_hints(section)[part]
    return get_args(get_type_hints(section)[name])


def chosen_option(case: Case, choice: FieldOptions[Any]) -> str:
    """Return the option that a case chooses."""
    found: Any = case
    for part in choice.path.split("."):
        found = getattr(found, part)
    return str(found)


def report_missing(case: Case, choice: FieldOptions[Any]) -> Problem | None:
    """Return the problem of a case that chooses an option without an implementation, or None."""
    option = chosen_option(case, choice)
    if choice.has(option):
        return None
    known = [other for other in list_options(choice.path) if choice.has(other)]
    message = f"`{option}` has no implementation: it would be in {choice.locate(option)}"
    return blame(choice.path, message, f"choose from {enumerate_names(known)}, or write it")
