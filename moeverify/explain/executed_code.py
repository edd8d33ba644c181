"""User code that a rank executes in a step and one device does not, or with other Python values.

No operators are needed: it compares the code of two runs of a script.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

from moeverify.explain.definitions import Definitions
from moeverify.explain.left_out import list_left_out
from moeverify.explain.program import Executed, Site, group_lines
from moeverify.explain.python_values import Name, PythonValues
from moeverify.explain.sites import find_line
from moeverify.explain.syntax import find_function, map_assignments
from moeverify.explain.user_lines import make_origin
from moeverify.results.culprit import Origin, OriginKind

_Line = tuple[str, int]
"""(file, line)."""

_MOST_DIFFERENT = 3
"""Maximum number of lines that differ; where more do, none stands out."""


class ExecutedCode:
    """Comparison of the code that ranks (`many`) and one device (`one`) executed up to a step with a wrong result.

    The results of earlier steps are right: lines and values that differ there, too, do not count.
    """

    def __init__(self, many: Sequence[Executed], one: Executed, step: int) -> None:
        skipped = set[tuple[str, int, int]]().union(*(each.skipped for each in (*many, one)))
        self._step = step
        self._many = [_leave_out(each, skipped, step) for each in many]
        self._one = _leave_out(one, skipped, step)
        self._first = min(self._one.lines, default=step)

    def find(self, calls: Sequence[_Line]) -> Iterator[Origin]:
        """Yield the lines from which the results of some calls may come, each a (file, line).

        First come lines that define other values than on one device, then lines that one side alone executes.
        """
        shared = {find_function(*line) for line in self._one.list_lines()}
        for call in calls:
            for site, difference in self._definitions.find_differences(*call).items():
                # A function that ranks alone execute sets up a mesh or groups.
                if difference.there is not None or find_function(site.file, site.line) in shared:
                    yield make_origin("definition", [site], difference).model_copy(
                        update={"is_branch": difference.there is None}
                    )
        is_near = self._find_near(calls)
        found: dict[Site, OriginKind] = dict.fromkeys(self._list_left_out(is_near), "skipped")
        for line in (line for mine in self._many for line in self._list_alone(mine, self._one, is_near)):
            found.setdefault(find_line(*line), "branch")
        if len(found) <= _MOST_DIFFERENT:
            yield from (make_origin(kind, [site]) for site, kind in found.items())

    def _find_near(self, calls: Sequence[_Line]) -> Callable[[_Line], bool]:
        """Return whether a line counts, for lines that one side alone executes.

        The first pass through a training loop ends after the second optimizer step at the latest. In it, ranks alone
        set up process groups and add up losses: only lines count in functions that the calls use, or that assign to
        the same names as they do.
        """
        if self._step > self._first + 1:
            return lambda line: True
        called = set[_Line]().union(*(self._definitions.list_called(*call) for call in calls))
        called -= {find_function(*call) for call in calls}
        names = {name for call in calls for name in _list_assigned(call)}
        return lambda line: find_function(*line) in called or not names.isdisjoint(_list_assigned(line))

    def _list_left_out(self, is_near: Callable[[_Line], bool]) -> Iterator[Site]:
        """Yield the conditions of lines that one device executes in this step for the first time, and no rank."""
        before = set[_Line]().union(*(lines for step, lines in self._one.lines.items() if step < self._step))
        many = set[_Line]().union(*(each.list_lines() for each in self._many))
        for each in list_left_out(self._one.list_lines(), many):
            lines = [(each.header.file, line) for line in each.lines]
            if before.isdisjoint(lines) and any(map(is_near, lines)):
                yield each.header

    def _list_alone(
        self, here: Executed, there: Executed, is_near: Callable[[_Line], bool]
    ) -> Iterable[_Line]:
        """Return the first line that one side alone executes, and not in an earlier step, in each function of both.

        Later lines of the function may follow from it.
        """
        before = set[_Line]().union(*(lines for step, lines in here.lines.items() if step < self._step))
        known = there.list_lines()
        shared = {find_function(*line) for line in there.lines.get(self._step, ())}
        found = dict[_Line, _Line]()
        for line in sorted(here.lines.get(self._step, set()) - before - known):
            function = find_function(*line)
            if function in shared and is_near(line):
                found.setdefault(function, line)
        return found.values()

    @cached_property
    def _definitions(self) -> Definitions:
        executed = group_lines(self._many)
        one, *many = (_choose(each, {self._first, self._step}) for each in (self._one, *self._many))
        before = range(self._first, self._step)
        earlier = PythonValues(_choose(self._one, before), [_choose(each, before) for each in self._many])
        again = set[Name]().union(*(each.get(self._step, {}) for each in many))
        harmless = {name for name in again if earlier.compare(name, ()) is not None}
        values = PythonValues(one, many, self._one.list_lines(), harmless)
        return Definitions(executed, lambda *_: False, executed, values, has_modules=True)


def _list_assigned(line: _Line) -> tuple[str, ...]:
    """Return the names and attributes to which a line assigns."""
    return map_assignments(line[0]).get(line[1], (0, ()))[1]


def _choose(executed: Executed, steps: Collection[int]) -> dict[int, dict[Name, list[Any]]]:
    """Return the values of some steps."""
    return {step: values for step, values in executed.names.items() if step in steps}


def _leave_out(executed: Executed, skipped: Collection[tuple[str, int, int]], step: int) -> Executed:
    """Return the code of all steps up to `step`, without functions of which only the first lines were followed."""

    def is_known(file: str, line: int) -> bool:
        return not any(file == other and first <= line <= last for other, first, last in skipped)

    lines = {
        number: {line for line in each if is_known(*line)}
        for number, each in executed.lines.items()
        if number <= step
    }
    names = {
        number: {name: values for name, values in each.items() if is_known(*name[:2])}
        for number, each in executed.names.items()
        if number <= step
    }
    return Executed(lines, names)
