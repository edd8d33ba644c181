"""Values of Python names, as a process assigns them, compared between ranks and one device."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Name = tuple[str, int, str]
"""(file, first line of an assignment or function, assigned name or parameter, or `syntax.RETURNED`)."""

MOST_VALUES = 256
"""Maximum number of values that are kept of each name, in each step."""

_MOST_MEMBERS = 32
_LONGEST = 200
_DEPTH = 3
_OTHER = "<object>"
"""Data of objects that are not compared, such as modules and meshes."""
_TENSOR = f"{_OTHER} tensor"
_GROUP = f"{_OTHER} group"
_GROUPS = (dist.ProcessGroup, DeviceMesh)
_PLAIN = (bool, int, str)
_NAMED = (torch.dtype, FunctionType, type)


class Difference(NamedTuple):
    """The first value of a name that differs: on a rank, and on one device (None if it does not run the line).

    Both are empty for collections of objects.
    """

    here: str
    there: str | None
    is_integer: bool = False


def encode(value: Any, depth: int = _DEPTH) -> Any:
    """Return numbers, strings, flags, dtypes and built-in collections of these as data that can be compared.

    Devices differ between ranks. Attributes of other objects may run code of the program, and so may `isinstance`,
    which asks for `__class__`. JSON can hold the data, with lists for tuples.
    """
    kind = type(value)
    if issubclass(kind, float):
        return float(f"{float(value):.9g}") if math.isfinite(value) else str(float(value))
    if issubclass(kind, str) and str.__len__(value) > _LONGEST:
        return str.__len__(value), zlib.crc32(str.encode(value, errors="replace")), _OTHER
    if value is None or issubclass(kind, _PLAIN):
        return value
    if issubclass(kind, _NAMED):
        return getattr(value, "__qualname__", str(value))
    if depth and (found := _list_members(value)) is not None:
        size, members = found
        kept = tuple(encode(each, depth - 1) for each, _ in zip(members, range(_MOST_MEMBERS), strict=False))
        return size, tuple(sorted(kept, key=repr)) if issubclass(kind, set | frozenset) else kept
    return _TENSOR if issubclass(kind, torch.Tensor) else _GROUP if issubclass(kind, _GROUPS) else _OTHER


def _list_members(value: Any) -> tuple[int, Iterable[object]] | None:
    """Return the size and the members of a built-in collection, or of the base of its subclass. None for others."""
    if issubclass(type(value), dict):
        return dict.__len__(value), dict.items(value)
    for kind in (list, tuple, set, frozenset):
        if issubclass(type(value), kind):
            return kind.__len__(value), kind.__iter__(value)
    return None


class PythonValues:
    """Comparison of names. The arguments have the values of each name, by step, of one device and of each rank.

    `lines` are those that one device executes. Names in `harmless` count as equal.
    """

    def __init__(
        self,
        one: Mapping[int, Mapping[Name, Sequence[Any]]],
        ranks: Sequence[Mapping[int, Mapping[Name, Sequence[Any]]]],
        lines: Collection[tuple[str, int]] = (),
        harmless: Collection[Name] = (),
    ) -> None:
        self._one, self._ranks, self._lines = one, ranks, lines
        self._of_one = set[Name]().union(*one.values())
        self._differences: dict[Name, Difference | None] = dict.fromkeys(harmless)

    def is_equal(self, name: Name) -> bool:
        """Return whether ranks and one device assigned the same numbers, strings or flags to a name."""
        if name not in self._of_one or self._find_difference(name) is not None:
            return False
        made = self._list_made(name)
        return bool(made) and _OTHER not in str(made)

    def is_number(self, name: Name) -> bool:
        """Return whether a name has numbers alone on the ranks."""
        made = self._list_made(name)
        return bool(made) and all(isinstance(each, int | float) for each in made)

    def is_object(self, name: Name) -> bool:
        """Return whether a name has objects alone, other than tensors, such as a mesh or a module."""
        made = set(map(str, self._list_made(name)))
        return bool(made) and made <= {_OTHER, _GROUP}

    def list_groups(self) -> set[Name]:
        """Return the names that have process groups or meshes on a rank."""
        steps = (values for rank in self._ranks for values in rank.values())
        return {name for values in steps for name, made in values.items() if _GROUP in made}

    def compare(self, name: Name, function: Iterable[int]) -> Difference | None:
        """Return the first value of a name that differs on any rank. None if all agree.

        Where a rank runs a line another number of times, its values must occur on one device. Names in a
        `function`, given by its lines, of which one device runs none, do not count.
        """
        if name in self._of_one:
            return self._find_difference(name)
        made = (each for each in self._list_made(name) if not _is_opaque(each))
        is_shared = any((name[0], line) in self._lines for line in function)
        return next((Difference(_show(each), None) for each in made), None) if is_shared else None

    def _list_made(self, name: Name) -> list[Any]:
        return [each for rank in self._ranks for values in rank.values() for each in values.get(name, ())]

    def _find_difference(self, name: Name) -> Difference | None:
        """Return the first difference of a name that one device assigns. Searches ask for a name again and again."""
        if name not in self._differences:
            self._differences[name] = next(self._list_differences(name), None)
        return self._differences[name]

    def _list_differences(self, name: Name) -> Iterator[Difference]:
        for rank in self._ranks:
            for step, values in rank.items():
                mine, theirs = values.get(name, ()), self._one.get(step, {}).get(name, ())
                pairs = zip(mine, theirs, strict=True) if len(mine) == len(theirs) else _pair(mine, theirs)
                for here, there in pairs:
                    if here != there and not (_is_opaque(here) or _is_opaque(there)):
                        yield _make_difference(*_find_member(here, there))


def _is_opaque(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(_OTHER)


def _pair(mine: Sequence[Any], theirs: Sequence[Any]) -> Iterable[tuple[Any, Any]]:
    """Yield each value that does not occur on one device, with the value that this has at its place, or the last."""
    for number, value in enumerate(mine if theirs else ()):
        if value not in theirs:
            yield value, theirs[min(number, len(theirs) - 1)]


def _find_member(here: Any, there: Any) -> tuple[Any, Any]:
    """Return the first members that differ of two encoded collections of one size, or else the values themselves."""
    is_pair = all(isinstance(each, tuple) and isinstance(each[-1], tuple) for each in (here, there))
    if not is_pair or here[0] != there[0]:
        return here, there
    return next(_find_member(*each) for each in zip(here[1], there[1], strict=True) if each[0] != each[1])


def _make_difference(here: Any, there: Any) -> Difference:
    is_integer = all(isinstance(each, int) and not isinstance(each, bool) for each in (here, there))
    return Difference(_show(here), _show(there), is_integer)


def _show(value: Any) -> str:
    """Return an encoded value as readers know it; empty if it has objects that are not compared."""
    text = _write(value)
    return "" if _OTHER in text else text


def _write(value: Any) -> str:
    if isinstance(value, tuple) and isinstance(value[-1], tuple):
        return f"{value[0]} items: {', '.join(map(_write, value[1]))}"
    return repr(value) if isinstance(value, str) and not value.startswith("torch.") else str(value)
