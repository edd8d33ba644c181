"""The smallest case that still shows a failure: greedy delta debugging over the fields of a case.

Does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from moeverify.verification.controller.reductions import Reducible, Values, name_values

ListFields = Callable[[Values], Sequence[Reducible] | None]
"""Function that returns the reducible fields of the case with some values, or None if that case is invalid."""

Shows = Callable[[Sequence[Values]], Sequence[bool]]
"""Function that returns whether each case shows the failure; it may run them together."""

Confirms = Callable[[Values], bool]
"""Function that returns whether a case that shows the failure shows it in the same line, which takes longer."""

T = TypeVar("T")
K = TypeVar("K")

Group = tuple[str, ...]
"""Fields that are reduced together."""


@dataclass
class Shrinking:
    """The state of a search: `values` are fields of the smallest case so far, `num_tried` counts cases."""

    list_fields: ListFields
    shows: Shows
    confirms: Confirms = lambda values: True
    values: dict[str, Any] = field(default_factory=dict)
    num_tried: int = 0
    _known: dict[str, bool] = field(default_factory=dict)
    _failed: dict[str, set[str]] = field(default_factory=dict)
    _least: dict[str, Any] = field(default_factory=dict)

    def search(self) -> None:
        """Reduce fields until no single field can be reduced further.

        Every round tries one smaller value of each field: all of them together, and if that does not show the
        failure, groups of them, then those groups together that show it, or as many of them as do. Values that
        failed alone are tried again after other fields have changed.
        """
        before = dict(self.values)
        while True:
            singles = self._list_singles()
            if not singles:
                if self.values == before:
                    return
                before = dict(self.values)
                self._failed.clear()
                continue
            whole = self._merge(list(singles.values()))
            is_new = name_values(whole) != name_values(self.values) and self.list_fields(whole) is not None
            if is_new and self._try([whole])[0] and self._confirm(whole):
                self.values = whole
                continue
            found = self._split(singles)
            if found:
                self._take(found)

    def _split(self, singles: Mapping[str, dict[str, Any]]) -> dict[Group, dict[str, Any]]:
        """Return the groups of reductions that show the failure, from halves on; those that do not are halved again.

        Few fields are needed by a failure, so that most cases that run are much smaller. One launch serves all groups
        of a size.
        """
        found: dict[Group, dict[str, Any]] = {}
        groups = _halve_list(list(singles))
        while groups:
            merged = {tuple(group): self._merge([singles[path] for path in group]) for group in groups}
            found |= self._find_shown(merged)
            failed = [group for group in groups if tuple(group) not in found]
            for group in failed:
                self._note_failed(tuple(group), merged[tuple(group)])
            groups = [part for group in failed if len(group) > 1 for part in _halve_list(group)]
        return found

    def _note_failed(self, group: Group, values: Values) -> None:
        """Note that the value of a field is not tried again, if it failed alone."""
        if len(group) == 1:
            self._failed[group[0]].add(json.dumps(values[group[0]]))

    def _take(self, found: Mapping[Group, dict[str, Any]]) -> None:
        """Go on with all groups together, or with the first one that is confirmed if they are not."""
        best = self._combine(list(found.values()))
        if not self._confirm(best):
            kept = {group: values for group, values in found.items() if self._confirm(values)}
            for group in found.keys() - kept.keys():
                self._note_failed(group, found[group])
            best = next(iter(kept.values()), self.values)
        self.values = dict(best)

    def _confirm(self, values: Values) -> bool:
        """Return whether a case that shows the failure is confirmed; if not, it counts as one that does not."""
        self._known[name_values(values)] = self.confirms(values)
        return self._known[name_values(values)]

    def _list_singles(self) -> dict[str, dict[str, Any]]:
        """Return a case for each field that has a value to try, with that field reduced."""
        fields = self.list_fields(self.values) or ()
        return {each.path: single for each in fields if (single := self._reduce(each, fields)) is not None}

    def _reduce(self, reducible: Reducible, fields: Sequence[Reducible]) -> dict[str, Any] | None:
        """Return the case with the next smaller value of a field, or None if none is left.

        The smallest value comes first. If it fails, the middle of the values above it is next.
        """
        failed = self._failed.setdefault(reducible.path, set())
        while left := self._list_left(reducible, failed):
            value = left[0] if not failed else left[(len(left) - 1) // 2]
            changed = self._complete(_set(self.values, reducible.path, value), reducible, value, fields)
            if changed is not None and self._known.get(name_values(changed)) is not False:
                return changed
            failed.add(json.dumps(value))
        return None

    def _list_left(self, reducible: Reducible, failed: set[str]) -> list[Any]:
        """Return the values that are above all that have failed."""
        # The least value depends on the size of the first one: a width stays a width.
        least = self._least.setdefault(reducible.path, reducible.smaller[0])
        first = reducible.smaller.index(least) if least in reducible.smaller else 0
        last = max((i for i, each in enumerate(reducible.smaller) if json.dumps(each) in failed), default=-1)
        return list(reducible.smaller[max(first, last + 1) :]) if reducible.value != least else []

    def _complete(
        self, changed: dict[str, Any], reducible: Reducible, value: Any, fields: Sequence[Reducible]
    ) -> dict[str, Any] | None:
        """Return a valid case with a reduced field, if necessary with one other field reduced in proportion."""
        if self.list_fields(changed) is not None:
            return changed
        for other in fields:
            if f"{reducible.path}.".startswith(f"{other.path}."):  # itself, or a section around it
                continue
            both = _set(changed, other.path, _choose(other, reducible, value))
            if self.list_fields(both) is not None:
                return both
        return None

    def _combine(self, found: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the case with all reductions that show the failure together, or with as many as possible."""
        groups = [list(found)]
        while len(groups[0]) > 1:
            shown = self._find_shown({place: self._merge(group) for place, group in enumerate(groups)})
            if shown:
                return max(
                    shown.values(), key=lambda each: sum(each[path] != self.values.get(path) for path in each)
                )
            groups = [part for group in groups for part in _halve_list(group)]
        return found[0]

    def _merge(self, group: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        merged = dict(self.values)
        for each in group:
            for path, value in each.items():
                if path not in self.values or self.values[path] != value:
                    merged = _set(merged, path, value)
        return merged

    def _find_shown(self, cases: Mapping[K, dict[str, Any]]) -> dict[K, dict[str, Any]]:
        """Return the valid cases that show the failure."""
        valid = {key: values for key, values in cases.items() if self.list_fields(values) is not None}
        shown = zip(valid.items(), self._try(list(valid.values())), strict=True)
        return {key: values for (key, values), is_shown in shown if is_shown}

    def _try(self, cases: Sequence[Mapping[str, Any]]) -> list[bool]:
        """Return whether each case shows the failure; a case that was tried before does not run again."""
        new = {name_values(each): each for each in cases if name_values(each) not in self._known}
        if new:
            self.num_tried += len(new)
            self._known.update(zip(new, self.shows(list(new.values())), strict=True))
        return [self._known[name_values(each)] for each in cases]


def _set(values: Values, path: str, value: Any) -> dict[str, Any]:
    """Return the values with one more; a section that is left out loses the values of its fields."""
    is_left_out = any(known is None and path.startswith(f"{each}.") for each, known in values.items())
    if is_left_out:
        return dict(values)
    kept = {each: known for each, known in values.items() if not f"{each}.".startswith(f"{path}.")}
    return {**kept, path: value}  # the last one is the latest


def _choose(other: Reducible, reducible: Reducible, value: Any) -> Any:
    """Return the smaller value of another field that comes nearest to the same proportion."""
    numbers = (other.value, reducible.value, value)
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in numbers):
        return other.smaller[-1]
    return next(
        (each for each in other.smaller if each * reducible.value >= other.value * value), other.smaller[-1]
    )


def _halve_list(group: list[T]) -> list[list[T]]:
    middle = (len(group) + 1) // 2
    return [part for part in (group[:middle], group[middle:]) if part]
