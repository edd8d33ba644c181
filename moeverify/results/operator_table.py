"""Operators of one step on both sides, each with its counterpart and its error. No torch."""

from __future__ import annotations

from typing import Literal

from moeverify.results.record import Record

TABLE_VERSION = 1

Phase = Literal["setup", "forward", "backward", "step"]

Outcome = Literal["match", "multiple", "differs", "shape", "alone", "uncompared"]
"""The result of comparing an operator with its counterpart.

| Outcome | Meaning |
|---|---|
| `match` | values of the other side: the whole tensor, a region or rows of it, or a partial sum |
| `multiple` | such values times a factor |
| `differs` | a counterpart with other values |
| `shape` | a counterpart, none of whose regions has this shape |
| `alone` | no counterpart |
| `uncompared` | no values were kept, no result is returned, or the time limit was reached |
"""


class CallSite(Record):
    """A call in source code. `offset` is the bytecode offset, which distinguishes calls on one line."""

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
    """One call of an operator. Operators and call sites are indices into the lists of their side.

    `sites` are the calling lines, innermost first; a derivative has the lines of the forward pass. `inputs`
    has one entry per input tensor: the operator that made it, or the name of a tensor that existed before
    the listed operators. `origin` is the forward operator of a derivative, or -1. `ranks` is the process
    group of a collective, and `axis` its mesh axis if known.
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
    """The operators of one process in one step, in execution order; `left_out` more are not listed."""

    sites: tuple[CallSite, ...] = ()
    operators: tuple[Operator, ...] = ()
    left_out: int = 0


class Compared(Record):
    """The comparison of an operator's results with its counterpart `other`, or -1 if it has none.

    `place` is the part of the counterpart's result, and `factor` the multiple. `error` is the norm of the
    difference relative to the norm of the correct values. For integers and masks it is the share of
    elements that differ.
    """

    outcome: Outcome
    other: int = -1
    other_rank: int = 0
    place: str = ""
    factor: float = 1.0
    error: float | None = None


class OperatorTable(Record):
    """The operators of both sides; `compared` has one list per list of `actual`, operator by operator.

    `bound` is the largest relative error of a match. `causes` are the first wrong operations as (rank,
    operator) of `actual`. `notes` describe the operators that are not listed or not compared.
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
