"""What a fault is: a real bug, how to break the code as it did, where it shows, and what should be found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeverify.case.schema import PRECISIONS, Case, Precision
from moeverify.faults.patch import Patch
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause

if TYPE_CHECKING:
    from moeverify.results.finding import Finding


@dataclass(frozen=True)
class Expected:
    """What a diagnosis should say of a fault: at any of some places, one of the right causes for what it does."""

    where: tuple[At, ...]
    causes: tuple[Cause, ...]

    def locates(self, finding: Finding) -> bool:
        """Return whether a finding points at what is really at fault."""
        return any(place.matches(finding) for place in self.where)

    def names(self, finding: Finding) -> bool:
        """Return whether the cause of a finding is a right one."""
        return finding.code in self.causes


@dataclass(frozen=True)
class Fault:
    """One real bug of the catalogue, made again.

    `source` names the issue, pull request or commit; `mechanism` says what was computed wrong, `trigger` under
    which layouts; `case` is the smallest setting under which it shows. `inject` wraps functions or methods of the
    parallel code in this process by the patch that it is given, which puts them back when its block ends. A bug
    of checkpoints has a `saver` too: that case saves, and `case` loads and trains on, both with the fault.
    `precisions` are those of recipes in which it is one: sums in bfloat16 are as a recipe of bfloat16 asks for.
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

    @property
    def target(self) -> str:
        """Return what `--fault` takes to inject this fault."""
        return f"{self.inject.__module__}:{self.inject.__name__}"

    @property
    def bug_class(self) -> str:
        """Return the class of the bug, a letter from A to P."""
        return self.number[0]
