"""What a fault is: a real bug, how to break the code as it did, where it shows, and what should be found."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from moeverify.case.schema import Case
from moeverify.faults.patch import Patch
from moeverify.results.cause import Cause


@dataclass(frozen=True)
class Expected:
    """What a diagnosis should say of a fault.

    `where` is a regular expression for what is really at fault: it must match the origin's tensor, its place
    or its axis, written as `tensor | where`. `causes` are the right names for what the fault does.
    """

    where: str
    causes: tuple[Cause, ...]

    def locates(self, text: str) -> bool:
        """Return whether a finding's place is the right one."""
        return re.search(self.where, text) is not None


@dataclass(frozen=True)
class Fault:
    """One real bug of the catalogue, made again.

    `source` names the issue, pull request or commit; `mechanism` says what was computed wrong, `trigger` under
    which layouts; `case` is the smallest setting under which it shows. `inject` wraps functions or methods of the
    parallel code in this process by the patch that it is given, which puts them back when its block ends. A bug
    of checkpoints has a `saver` too: that case saves, and `case` loads and trains on, both with the fault.
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

    @property
    def target(self) -> str:
        """Return what `--fault` takes to inject this fault."""
        return f"{self.inject.__module__}:{self.inject.__name__}"

    @property
    def bug_class(self) -> str:
        """Return the class of the bug, a letter from A to O."""
        return self.number[0]
