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
    cases: tuple[str, ...] = ()
    outcome: Outcome
    finding: Finding | None = None
    said: str = ""
    loss_curve: bool = False
    loss_and_norm: bool = False
    reason: str = ""
    seconds: float = 0.0
