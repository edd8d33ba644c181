"""How a bug that was made by machine came out, as plain data without torch."""

from __future__ import annotations

from typing import Literal

from moeverify.results.finding import Finding
from moeverify.results.record import Record

Outcome = Literal[
    "detected", "crashed", "hung", "survived", "equivalent", "not run", "not executed", "no bug"
]
"""What became of a mutant: the checks differ, a rank failed, a rank hung, all passed (though it should not, or
though it can make no difference), its line was not reached in time, no layout executes it, or it is no bug in the
precision that was asked for, and did not run."""

CauseVerdict = Literal["right", "place", "none", "wrong", "open", ""]
"""How true the cause is: right, only the module or stage is named and rightly so, nothing is said, wrong, or not to
be judged by rule; "" where nothing was detected."""


class Judgement(Record):
    """What is to be thought of what was said of a mutant.

    `located` is None where its code serves every axis and module, so that no place is wrong. `because` says by which
    rule, and `by_hand` that a person has judged.
    """

    located: bool | None = None
    cause: CauseVerdict = ""
    because: str = ""
    by_hand: bool = False


Span = tuple[int, int, int, int]


class CoveredCode(Record):
    """What the ranks of a clean case have executed, by file below the package. `seconds` is their time.

    A span is (line, column, last line, end column) of the source of an instruction: of a line with a conditional
    expression one branch alone is executed.
    """

    name: str
    ranks: int
    seconds: float
    spans: dict[str, tuple[Span, ...]]


class MutantRow(Record):
    """One mutant: what was rewritten, where it ran, and what came of it.

    `cases` are the layouts that were tried, in order; the last one is that of the outcome. `finding` is the first
    that follows from none, and `said` its cause in words. `loss_curve` says whether the losses of some step differ by
    more than a relative 1e-3, `loss_and_norm` whether they or the gradient norm do.
    """

    name: str
    operator: str
    file: str
    line: int
    before: str
    after: str
    counted_only: bool
    cases: tuple[str, ...] = ()
    outcome: Outcome
    judgement: Judgement = Judgement()
    finding: Finding | None = None
    said: str = ""
    loss_curve: bool = False
    loss_and_norm: bool = False
    reason: str = ""
    seconds: float = 0.0
