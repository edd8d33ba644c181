"""The operation that makes a result wrong, as the explainer found it in the recorded programs. No torch."""

from __future__ import annotations

from typing import Literal

from moeverify.results.cause import Cause
from moeverify.results.record import Record

Mechanism = Literal[
    "number",
    "operator",
    "operand",
    "total",
    "share",
    "whole",
    "removed",
    "inserted",
    "returned",
    "value",
    "scale",
    "reduction",
    "moved",
    "race",
    "written",
    "place",
]
"""What a culprit says of an operation.

| Mechanism | Meaning |
|---|---|
| `number` | it has another number or option |
| `operator` | it is another operator |
| `operand` | it takes another value |
| `total` | it takes a part of a sum where one device has the sum |
| `share` | it adds to each part of a sum what counts once |
| `whole` | it works on a part of a tensor where one device works on all of it |
| `removed` | one device has no such operation |
| `inserted` | one device applies another operation before it |
| `returned` | a module returns its result where one device returns another value |
| `value` | its results are wrong although its operands are right |
| `scale` | its results are a multiple of the right ones |
| `reduction` | its results are parts of a sum that is not made |
| `moved` | its results are right values in other places |
| `race` | it uses memory that a collective is still using |
| `written` | the operation that wrote most right values before the first step has not written these |
| `place` | the first operation whose results are not those of one device |
"""

_CODES: dict[Mechanism, Cause] = {
    "total": Cause.MISSING_REDUCTION,
    "reduction": Cause.MISSING_REDUCTION,
    "scale": Cause.SCALE,
    "moved": Cause.PERMUTATION,
    "race": Cause.NONDETERMINISM,
}


class CodeLine(Record):
    """A call in source code: its line, its expression, and the lines of the file around it, each with its number."""

    file: str
    line: int
    function: str = ""
    expression: str = ""
    lines: tuple[tuple[int, str], ...] = ()


class Operation(Record):
    """One operator of a recorded program. `line` is None for what autograd calls; `callers` are outer calls.

    Of a derivative, which autograd computes, the lines are those of the forward pass.
    """

    operator: str
    line: CodeLine | None = None
    callers: tuple[CodeLine, ...] = ()
    module: str = ""
    phase: str = "forward"
    step: int = -1
    is_derivative: bool = False


class Source(Record):
    """Which value of one device a value is: a parameter, buffer or input (`label`), or what an operation made.

    `over` names mesh axes over which it is a part of a sum, `scale` the factor that it has been multiplied by. A mix
    has elements of `others` too, and `zeros` is the share of elements that are zero, beyond that of the right value.
    """

    label: str = ""
    operation: Operation | None = None
    step: int = -1
    over: tuple[str, ...] = ()
    scale: float = 1.0
    others: tuple[Source, ...] = ()
    zeros: float = 0.0


class Culprit(Record):
    """The first wrong operation: `here` on the ranks, `there` on one device, where it has a counterpart.

    In a race `there` is the collective of the ranks that may still use the memory that `here` uses.

    `proved` says that the ranks' program was executed with the change that `mechanism` names, and that this made
    `repaired` right: tensors that the training loop shows. `residual` is the relative error that these have then.
    With `is_local` the change makes only the result of the operation right; further operations are wrong.
    `operand` is the place of the operand that is `taken` where one device takes `right`; `made` is the operation of
    the rank that computed it, or that wrote the values which are right before the first step. `numbers` are pairs
    of different numbers, here and there. `moves` are operations by which an operand came from where it was
    computed, and `moves_there` those of one device. `others` are further lines with the same mistake. `results` are
    the wrong ones that it is about, `factor` times the right ones. `leads` says that it is the cause which a report
    states, and no evidence for another one. Where no change is proved, `between` are the operations from right
    inputs to the first result that should be right and is not, one for each line.
    """

    mechanism: Mechanism
    proved: bool
    here: Operation
    there: Operation | None = None
    ranks: tuple[int, ...] = ()
    operand: int = -1
    taken: Source | None = None
    made: Operation | None = None
    right: Source | None = None
    axes: tuple[str, ...] = ()
    numbers: tuple[tuple[str, str], ...] = ()
    moves: tuple[Operation, ...] = ()
    moves_there: tuple[Operation, ...] = ()
    repaired: tuple[str, ...] = ()
    residual: float | None = None
    is_local: bool = False
    others: tuple[Operation, ...] = ()
    leads: bool = False
    results: tuple[str, ...] = ()
    factor: float = 1.0
    between: tuple[Operation, ...] = ()

    @property
    def code(self) -> Cause:
        """Return the cause that it is one of."""
        if self.mechanism in _CODES and not (self.mechanism == "scale" and self.here.phase == "step"):
            return _CODES[self.mechanism]
        if self.taken is not None and self.right is not None and _is_stale(self.taken, self.right):
            return Cause.STALE
        return {"forward": Cause.FORWARD, "backward": Cause.BACKWARD, "step": Cause.OPTIMIZER}.get(
            self.here.phase, Cause.FORWARD
        )


def _is_stale(taken: Source, right: Source) -> bool:
    """Return whether a value is another version of the right one: of the same name, or made in another step."""
    if taken.label or right.label:
        return taken.label == right.label
    return (
        taken.operation is not None
        and right.operation is not None
        and taken.operation.line is not None
        and taken.operation.line == right.operation.line
        and taken.operation.operator == right.operation.operator
        and taken.step != right.step
    )
