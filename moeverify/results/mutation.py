"""Results of machine-generated bugs (mutants), as plain data without torch."""

from __future__ import annotations

from typing import Literal

from moeverify.results.finding import Finding
from moeverify.results.record import Record

Outcome = Literal[
    "detected", "crashed", "hung", "survived", "equivalent", "not run", "not executed", "no bug"
]
"""The outcome of a mutant.

| Outcome | Meaning |
|---|---|
| `detected` | a check differs |
| `crashed` | a rank failed |
| `hung` | a rank hung |
| `survived` | all checks pass although the mutant should change a result |
| `equivalent` | all checks pass, and the mutant cannot change a result |
| `not run` | the line of the mutant was not reached in time |
| `not executed` | no layout executes the line |
| `no bug` | no bug in the requested precision, so it did not run |
"""

CauseVerdict = Literal["right", "place", "none", "wrong", "open", ""]
"""The correctness of a cause.

`place` means that only the module or stage is named, and correctly. `none` means that no cause is named.
`open` means that no rule can judge the cause. It is empty if nothing was detected.
"""


class MutantJudgement(Record):
    """A judgement of the report on a mutant.

    `located` is None if the mutated code serves every axis and module, so that no place is wrong. `because`
    names the rule, and `by_hand` marks a judgement by a person.
    """

    located: bool | None = None
    cause: CauseVerdict = ""
    because: str = ""
    by_hand: bool = False


Span = tuple[int, int, int, int]


class CoveredCode(Record):
    """The code that the ranks of a clean case executed, by file below the package.

    `seconds` is the run time. A span is (line, column, last line, end column) of the source of an
    instruction. In a line with a conditional expression, only the executed branch is covered.
    """

    name: str
    ranks: int
    seconds: float
    spans: dict[str, tuple[Span, ...]]


class MutantRow(Record):
    """One mutant: the rewritten code, the layouts in which it ran, and the outcome.

    `cases` are the layouts in the order in which they were tried; the outcome is from the last one.
    `finding` is the first finding that follows from no other, and `said` its cause in words. `loss_curve`
    is whether the losses of some step differ by more than a relative 1e-3. `loss_and_norm` is whether the
    losses or the gradient norm do.
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
    judgement: MutantJudgement = MutantJudgement()
    finding: Finding | None = None
    said: str = ""
    loss_curve: bool = False
    loss_and_norm: bool = False
    reason: str = ""
    seconds: float = 0.0
