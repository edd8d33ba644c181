"""Smaller values of the fields of a case, from the schema alone. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moeverify.cases.expectation import expect
from moeverify.cases.fields import Section
from moeverify.cases.function import read_defaults
from moeverify.cases.schema import Case, CustomModel

Values = Mapping[str, Any]
"""Values of fields by dotted path, as `--set` takes them."""

# The least value to which sizes above twice this are reduced: below, a permutation looks like a scale.
_LEAST_WIDTH = 8


@dataclass(frozen=True)
class Reducible:
    """A field with its value, and smaller values from the smallest on."""

    path: str
    value: Any
    smaller: tuple[Any, ...]


def list_reducible(case: Case, folders: Sequence[str] = ()) -> list[Reducible]:
    """Return the fields of a case that can be smaller or back at their defaults, layout first.

    A whole number is reduced to powers of two down to its least value in the schema. Any other field goes
    back to its default. Fields with names of functions and files stay, and so do required ones. The
    arguments of a factory include the defaults of its parameters; its source is found in `folders`.
    """
    model = case.recipe.model
    found = list(_walk(case.layout, "layout"))
    if isinstance(model, CustomModel):
        defaults = read_defaults(model.factory, folders)
        given = {name: value for name, value in defaults.items() if name not in model.arguments}
        found += _list_arguments(given, "recipe.model.arguments")
    return [*found, *_walk(case.recipe, "recipe")]


def format_values(values: Values) -> list[str]:
    """Return the values as texts of `--set`."""
    return [f"{path}={json.dumps(value)}" for path, value in values.items()]


def name_values(values: Values) -> str:
    """Return a name of the case with these values."""
    return json.dumps(values, sort_keys=True)


def _walk(section: Section, prefix: str) -> Iterator[Reducible]:
    """Yield the reducible fields of a section, then those of its inner sections, small sections first.

    The first ones, such as the number of steps, make all later cases faster.
    """
    inner: list[tuple[str, Section]] = []
    for name, field in type(section).model_fields.items():
        path, value = f"{prefix}.{name}", getattr(section, name)
        if isinstance(value, Section):
            if not field.is_required() and field.get_default(call_default_factory=True) is None:
                yield Reducible(path, "a section", (None,))
            inner.append((path, value))
            continue
        expected = expect(type(section), name)
        is_fixed = field.is_required() or (isinstance(value, str) and not expected.choices)
        default = value if is_fixed else field.get_default(call_default_factory=True)
        if name == "arguments":  # of a user's function: only numbers have an order
            yield from _list_arguments(value, path)
        elif _is_number(value) and (least := expected.least) is not None:
            if smaller := _halve(value, least):
                yield Reducible(path, value, smaller)
        elif value != default:
            yield Reducible(path, value, (default,))
    for path, value in sorted(inner, key=lambda item: len(type(item[1]).model_fields)):
        yield from _walk(value, path)


def _list_arguments(arguments: Mapping[str, Any], path: str) -> Iterator[Reducible]:
    for name, value in arguments.items():
        if _is_number(value) and value > 1 and "." not in name:
            yield Reducible(f"{path}.{name}", value, _halve(value, 1))


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _halve(value: int, least: int) -> tuple[int, ...]:
    """Return the least value and the powers of two below a value, but no small width except zero."""
    floor = _LEAST_WIDTH if value > 2 * _LEAST_WIDTH else 1
    powers = [1 << power for power in range(value.bit_length()) if 1 << power >= floor]
    all_values = [least, *powers] if least in (0, floor) else powers
    return tuple(dict.fromkeys(each for each in all_values if least <= each < value))
