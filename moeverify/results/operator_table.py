"""The operators of one step on both sides, each with its counterpart and how far its result is off. No torch."""

from __future__ import annotations

from typing import Literal

from moeverify.results.record import Record

TABLE_VERSION = 1

Phase = Literal["setup", "forward", "backward", "step"]

Outcome = Literal["match", "multiple", "differs", "shape", "alone", "uncompared"]
"""What the comparison of an operator's results says.

| Outcome | Meaning |
|---|---|
| `match` | values of the other side: the whole tensor, a region or rows of it, or a part of a sum |
| `multiple` | such values times a factor |
| `differs` | a counterpart, and other values |
| `shape` | a counterpart, of which no region has this shape |
| `alone` | no counterpart |
| `uncompared` | no values were kept, nothing is returned, or the time was over |
"""


class CallSite(Record):
    """A call in source code. `offset` is that of its bytecode, which tells calls of one line apart."""

    file: str
    line: int
    function: str
    expression: str = ""
    offset: int = 0


class OperatorResult(Record):
    """A tensor that an operator returns or writes."""

    shape: tuple[int, ...]
    dtype: str


class Operator(Record):
    """One call of an operator. Operators and call sites are numbers into the lists of their side.

    `sites` are the calling lines, the innermost first; those of a derivative are those of the forward pass. `inputs`
    has for each tensor that it takes the operator that made it, or the name of the tensor where that was before the
    listed ones. `origin` is the operator of the forward pass of which this is the derivative, -1 for others. `ranks`
    are those of the process group of a collective, `axis` the mesh axis of it, where known.
    """

    name: str
    phase: Phase
    module: str = ""
    sites: tuple[int, ...] = ()
    results: tuple[OperatorResult, ...] = ()
    inputs: tuple[int | str, ...] = ()
    origin: int = -1
    ranks: tuple[int, ...] = ()
    axis: str = ""


class OperatorList(Record):
    """The operators of one process in one step, in the order of execution; `left_out` more are not listed."""

    sites: tuple[CallSite, ...] = ()
    operators: tuple[Operator, ...] = ()
    left_out: int = 0


class Compared(Record):
    """How the results of an operator relate to those of its counterpart, the operator `other`; -1 if it has none.

    `place` says which part of the counterpart's result it is. `factor` is the multiple. `error` is the norm of the
    difference by the norm of the right values, for whole numbers and masks the share of elements that differ.
    """

    outcome: Outcome
    other: int = -1
    other_rank: int = 0
    place: str = ""
    factor: float = 1.0
    error: float | None = None


class OperatorTable(Record):
    """The operators of both sides. `compared` has the comparisons of each list of `actual`, operator by operator.

    `bound` is the largest relative error of a match. `causes` are the first wrong operations as (rank, operator) of
    `actual`. `notes` say what is not listed or not compared.
    """

    version: int
    title: str
    step: int
    expected_name: str
    actual_name: str
    bound: float
    expected: tuple[OperatorList, ...]
    actual: tuple[OperatorList, ...]
    compared: tuple[tuple[Compared, ...], ...]
    causes: tuple[tuple[int, int], ...] = ()
    notes: tuple[str, ...] = ()
