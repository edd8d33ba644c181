"""The values that a field of the schema accepts: validation, and wording for messages."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from moeverify.cases.entry import Entry
from moeverify.cases.fields import Section
from moeverify.cases.schema import Case

_CONFIG = ConfigDict(strict=True, allow_inf_nan=False)


class Rejected(Exception):
    """A value that its field does not accept."""


class Expectation:
    """The values that one non-section field accepts. The JSON schema for messages is computed on demand."""

    def __init__(self, section: type[Section], name: str) -> None:
        self._field = section.model_fields[name]
        self._adapter: TypeAdapter[Any] = TypeAdapter(_read_hints(section)[name], config=_CONFIG)

    def read(self, entry: Entry) -> Any:
        """Return the validated value of `entry`.

        Raises: Rejected when the field does not accept the value.
        """
        try:
            return self._adapter.validate_json(json.dumps(entry.plain()))
        except ValidationError:
            raise Rejected from None

    @property
    def words(self) -> str:
        """Return a description of the accepted values."""
        return describe(self._schema)

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the allowed words of a choice, or an empty tuple."""
        return tuple(str(word) for word in self._schema.get("enum", ()))

    @property
    def least(self) -> int | None:
        """Return the least value of an integer, or None if the field is none or has no least value."""
        kinds = [self._schema, *self._schema.get("anyOf", ())]
        return next(
            (each["minimum"] for each in kinds if each.get("type") == "integer" and "minimum" in each), None
        )

    @property
    def stand_in(self) -> Any:
        """Return the default, or some accepted value if the field is required."""
        if self._field.is_required():
            return _invent(self._schema)
        return self._field.get_default(call_default_factory=True)

    @functools.cached_property
    def _schema(self) -> Mapping[str, Any]:
        return self._adapter.json_schema()


@functools.cache
def expect(section: type[Section], name: str) -> Expectation:
    """Return the expectation for the field `name` of `section`."""
    return Expectation(section, name)


@functools.cache
def find_sections(section: type[Section], name: str) -> tuple[type[Section], ...]:
    """Return the sections that the field `name` of `section` may hold; none if it holds a plain value."""
    hint = _read_hints(section)[name]
    options = get_args(hint) or (hint,)
    return tuple(item for item in options if isinstance(item, type) and issubclass(item, Section))


@functools.cache
def _read_hints(section: type[Section]) -> Mapping[str, Any]:
    return get_type_hints(section, include_extras=True)


def is_nullable(section: type[Section], name: str) -> bool:
    """Return whether the field `name` of `section` may be null."""
    return type(None) in get_args(_read_hints(section)[name])


@functools.cache
def index_fields() -> Mapping[str, tuple[str, ...]]:
    """Return the dotted paths of all fields that a user may write, by field name."""
    index: dict[str, list[str]] = {}

    def walk(section: type[Section], prefix: str) -> None:
        for name in section.model_fields:
            path = prefix + name
            if path in {"file", "recipe.model.preset"}:
                continue
            paths = index.setdefault(name, [])
            if path not in paths:
                paths.append(path)
            for inner in find_sections(section, name):
                walk(inner, path + ".")

    walk(Case, "")
    index["preset"] = ["recipe.model.preset"]
    index["base"] = ["recipe.base"]
    return MappingProxyType({name: tuple(paths) for name, paths in index.items()})


def describe(schema: Mapping[str, Any]) -> str:
    """Return a description of the values that the JSON schema of a field accepts."""
    if "enum" in schema or "const" in schema:
        words = [f"`{word}`" for word in schema.get("enum", [schema.get("const")])]
        return words[0] if len(words) == 1 else "one of " + ", ".join(words)
    if "anyOf" in schema:
        return " or ".join(describe(option) for option in schema["anyOf"])
    kind = str(schema.get("type"))
    if kind in {"integer", "number"}:
        return ("an integer" if kind == "integer" else "a number") + _describe_range(schema)
    if kind == "array":
        return _describe_list(schema)
    if "pattern" in schema:
        return "`package.module:function`"
    names = {"boolean": "`true` or `false`", "null": "nothing", "object": "a mapping", "string": "text"}
    return names.get(kind, "a value")


def _describe_list(schema: Mapping[str, Any]) -> str:
    items = schema.get("prefixItems", [])
    if items:
        return f"a list of {len(items)}, each {describe(items[0])}"
    return f"a list, each {describe(schema['items'])}" if "items" in schema else "a list"


def _describe_range(schema: Mapping[str, Any]) -> str:
    low, high, above = (schema.get(key) for key in ("minimum", "maximum", "exclusiveMinimum"))
    if above is not None:
        return f" > {above:g}" + (f" and <= {high:g}" if high is not None else "")
    if low is not None and high is not None:
        return f" from {low:g} to {high:g}"
    return f" >= {low:g}" if low is not None else ""


def _invent(schema: Mapping[str, Any]) -> Any:
    """Return an accepted value, used to build the section if the user's value is wrong."""
    return "missing:missing" if schema.get("type") == "string" else schema.get("minimum", 1)
