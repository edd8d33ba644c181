"""Faults: real bugs, with an injection, the smallest case that shows them, and the expected finding."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from moeverify.cases.schema import PRECISIONS, Case, Precision
from moeverify.faults.patch import Patch
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause

if TYPE_CHECKING:
    from moeverify.results.finding import Finding


@dataclass(frozen=True)
class Expected:
    """Acceptable diagnosis of a fault: any of these places, and any of these causes."""

    where: tuple[At, ...]
    causes: tuple[Cause, ...]

    def locates(self, finding: Finding) -> bool:
        """Return whether a finding points at the actual fault."""
        return any(place.matches(finding) for place in self.where)

    def names(self, finding: Finding) -> bool:
        """Return whether the cause of a finding is acceptable."""
        return finding.code in self.causes


@dataclass(frozen=True)
class Fault:
    """One real bug of the catalogue, reproduced.

    - `source`: the issue, pull request or commit.
    - `mechanism`: the wrong computation.
    - `trigger`: the layouts in which it occurs.
    - `case`: the smallest setting that shows it.
    - `inject`: wraps functions or methods of the parallel code in this process with the given patch, which
      restores them when its block ends.
    - `saver`: for a bug of checkpoints, the case that saves. `case` then loads and continues training. Both
      run with the fault.
    - `precisions`: the precisions of recipes in which it is a bug. Sums in bfloat16 are no bug in a
      bfloat16 recipe.
    """

    number: str
    title: str
    source: str
    mechanism: str
    trigger: str
    case: Case
    expected: Expected
    inject: Callable[[Patch], None]
    is_moe: bool = True
    notes: str = ""
    saver: Case | None = None
    precisions: tuple[Precision, ...] = PRECISIONS

    def __call__(self, patch: Patch) -> None:
        """Inject the fault."""
        self.inject(patch)

    @property
    def target(self) -> str:
        """Return the `--fault` argument that injects this fault."""
        return f"{self.inject.__module__}:{self.inject.__name__}"

    def shows_line(self, finding: Finding) -> bool:
        """Return whether a finding shows a line of this fault: of its injection, or of a helper that it calls.

        The first wrong operation and the lines to look at count, the calls around them do not.
        """
        culprit = finding.culprit
        if culprit is None:
            return False
        file = f"catalogue/{Path(inspect.getfile(self.inject)).name}"
        own = [number for function in _list_called(self.inject) for number in _list_lines(function)]
        lines = [culprit.here.line, *(origin.line for origin in culprit.origins)]
        return any(line is not None and line.file.endswith(file) and line.line in own for line in lines)

    @property
    def bug_class(self) -> str:
        """Return the class of the bug, a letter from A to P."""
        return self.number[0]


def _list_called(function: Any) -> list[Any]:
    """Return a function, and the functions of its module that it calls, or that these call."""
    found = [function]
    for each in found:
        named = (each.__globals__.get(name) for name in _list_names(each.__code__))
        own = [value for value in named if getattr(value, "__module__", "") == function.__module__]
        found += [value for value in own if inspect.isfunction(value) and value not in found]
    return found


def _list_names(code: CodeType) -> Iterator[str]:
    """Yield the global names and attributes that code uses, including the code of its inner functions."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _list_names(inner)


def _list_lines(function: Any) -> range:
    lines, first = inspect.getsourcelines(function)
    return range(first, first + len(lines))


def fault(
    number: str, *, where: tuple[At, ...], causes: tuple[Cause, ...], **fields: Any
) -> Callable[[Callable[[Patch], None]], Fault]:
    """Return a decorator that makes a fault of its injection.

    `where` and `causes` are the fields of `Expected`; `fields` are the other fields of `Fault`.
    """
    return lambda inject: Fault(number, expected=Expected(where, causes), inject=inject, **fields)
