"""A run in less than 4 kB, for programs that choose the next command by it. No torch."""

from __future__ import annotations

from moeverify.results.finding import Verdict
from moeverify.results.record import Record

MOST_BYTES = 4000


class NextStep(Record):
    """A command to try next, and its purpose."""

    command: str
    purpose: str


class BriefFinding(Record):
    """A finding that follows from no other. `number` is its number for `moeverify explain RUN`.

    `code` is the code of its cause and `mechanism` that of its culprit; `moeverify explain CODE` describes
    both. With `proved`, a repair of the first of `lines` made the results right. `lines` are those of the first
    wrong operation, or of the maker of its wrong input, then of its counterpart on one device, then moves of a
    wrong operand, lines to look at with their callers, and others with the same mistake; each but the first ends
    with its relation to the first in parentheses.
    """

    number: int
    check: str
    tensor: str
    step: int
    ranks: tuple[int, ...] = ()
    error: float
    bound: float
    code: str = ""
    mechanism: str = ""
    proved: bool = False
    cause: str = ""
    where: str = ""
    lines: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()


class BriefCase(Record):
    """A case that did not pass. `omitted` counts its other findings."""

    name: str
    file: str = ""
    verdict: Verdict
    reason: str = ""
    layout: str = ""
    findings: tuple[BriefFinding, ...] = ()
    omitted: int = 0


class Brief(Record):
    """The result of a run: its verdict, the cases that did not pass, and the commands to try next.

    `counts` has the number of cases by verdict, `omitted` the number of cases left out for size, and
    `waiting` that of cases without a result while the run goes on. `next` belongs to the first case.
    """

    schema_version: int
    verdict: Verdict
    counts: dict[Verdict, int]
    waiting: int = 0
    seconds: float = 0.0
    cases: tuple[BriefCase, ...] = ()
    omitted: int = 0
    next: tuple[NextStep, ...] = ()
