"""Tree of values written by a user, each with its file and line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Scalar = str | int | float | bool | None
Content = Scalar | dict[str, "Entry"] | list["Entry"]

# Paths of fields in a message, such as `layout.tp`.
_FIELD = re.compile(r"(?<![\w./-])(?:recipe|layout|checks)(?:\.\w+)*(?![\w/-])")


@dataclass(frozen=True)
class FileLine:
    """A file (or `--set`) and a line, counted from 1. `line` is None if the source has no lines."""

    file: str = ""
    line: int | None = None


@dataclass(frozen=True)
class Entry:
    """A value with the place of its key: a scalar, a mapping of names to entries, or a list of entries."""

    content: Content
    place: FileLine = FileLine()

    @property
    def is_mapping(self) -> bool:
        """Return whether this entry is a mapping. If so, `fields` holds all of its content."""
        return isinstance(self.content, dict)

    @property
    def fields(self) -> dict[str, Entry]:
        """Return the entries of a mapping by name, or an empty dict for any other content."""
        return self.content if isinstance(self.content, dict) else {}

    def without(self, *names: str) -> Entry:
        """Return this mapping without the fields `names`."""
        return Entry({name: entry for name, entry in self.fields.items() if name not in names}, self.place)

    def plain(self) -> Any:
        """Return the value as plain dicts, lists and scalars."""
        if isinstance(self.content, dict):
            return {name: entry.plain() for name, entry in self.content.items()}
        if isinstance(self.content, list):
            return [entry.plain() for entry in self.content]
        return self.content

    def has(self, path: Sequence[str]) -> bool:
        """Return whether the user wrote the field at `path`."""
        entry = self
        for name in path:
            if name not in entry.fields:
                return False
            entry = entry.fields[name]
        return True

    def locate(self, path: Sequence[str]) -> FileLine:
        """Return the place of the field at `path`, or of its nearest ancestor that was written.

        A name may end in a list index: `placement[1]`.
        """
        entry = self
        for step in path:
            name, _, index = step.partition("[")
            if name not in entry.fields:
                break
            entry = entry.fields[name]
            items = entry.content
            if index and isinstance(items, list) and int(index.rstrip("]")) < len(items):
                entry = items[int(index.rstrip("]"))]
        return entry.place

    def find_line(self, text: str = "") -> int:
        """Return the line of the first field of this case that `text` names, else of `layout:`."""
        named = [found[0].split(".") for found in _FIELD.finditer(text)]
        for field in [*named, ["layout"], ["recipe"]]:
            if field[0] in self.fields:
                return self.locate(field).line or 1
        return 1


def build_entry(value: Any, place: FileLine) -> Entry:
    """Return `value` (dicts, lists and scalars) as a tree in which every entry is at `place`."""
    if isinstance(value, dict):
        return Entry({name: build_entry(item, place) for name, item in value.items()}, place)
    if isinstance(value, list | tuple):
        return Entry([build_entry(item, place) for item in value], place)
    return Entry(value, place)


def merge(base: Entry, change: Entry) -> Entry:
    """Return `base` updated by `change`. Mappings are merged recursively; other values are replaced."""
    if not (base.is_mapping and change.is_mapping):
        return change
    fields = dict(base.fields)
    for name, entry in change.fields.items():
        fields[name] = merge(fields[name], entry) if name in fields else entry
    return Entry(fields, change.place)


def show(entry: Entry) -> str:
    """Return a description of the value of `entry` for a message."""
    content = entry.content
    if content is None:
        return "nothing"
    if isinstance(content, dict):
        return "a mapping"
    if isinstance(content, list):
        return f"a list of {len(content)}"
    if isinstance(content, bool):
        return f"`{str(content).lower()}`"
    text = str(content)
    quoted = f"`{text[:60]}...`" if len(text) > 60 else f"`{text}`"
    return f"the text {quoted}" if isinstance(content, str) and _reads_as_number(text) else quoted


def _reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
