"""The operation that makes a result wrong, as the explainer finds it in the recorded programs. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
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
    "created",
    "block",
    "owned",
    "scale",
    "group",
    "unreduced",
    "dtype",
    "reduction",
    "moved",
    "shared",
    "race",
    "overwritten",
    "written",
    "place",
]
"""The difference between an operation on the ranks and its counterpart on one device.

`moeverify.report.codes` describes each.
"""

_CODES: dict[Mechanism, Cause] = {
    "total": Cause.MISSING_REDUCTION,
    "reduction": Cause.MISSING_REDUCTION,
    "unreduced": Cause.MISSING_REDUCTION,
    "group": Cause.COLLECTIVES,
    "scale": Cause.SCALE,
    "moved": Cause.PERMUTATION,
    "block": Cause.LAYOUT,
    "shared": Cause.STATE,
    "race": Cause.NONDETERMINISM,
    "overwritten": Cause.STATE,
}


_OF_VALUES = ("operand", "whole", "number", "scale", "share", "moved")
"""Mechanisms of a wrong value, which another line may have made."""

_OF_NUMBERS = ("number", "scale")
"""Mechanisms of a wrong number."""

_LARGEST = 1000
"""Maximum denominator of a factor that is no measurement."""

_INDEXED = ("index_put", "index_copy", "scatter")
"""Operators that write rows to other places."""


class CodeLine(Record):
    """A call in source code: its line, its expression and the numbered lines around it."""

    file: str
    line: int
    function: str = ""
    expression: str = ""
    lines: tuple[tuple[int, str], ...] = ()


class Operation(Record):
    """One operator of a recorded program.

    `line` is the call in source code, None for operators that autograd calls. `callers` are the outer
    calls. For a derivative, which autograd computes, the lines are the ones of the forward pass.
    """

    operator: str
    line: CodeLine | None = None
    callers: tuple[CodeLine, ...] = ()
    module: str = ""
    phase: str = "forward"
    step: int = -1
    is_derivative: bool = False


class SourceValue(Record):
    """The value on one device that equals a given value, up to a factor or a sum.

    `label` names a parameter, buffer or input; otherwise `operation` computed the value. `over` names the
    mesh axes over which the given value is a partial sum. `scale` is its factor relative to the source. A
    mixed value also has elements of `others`. `rows` are its first indices in dim 0, where another value of the
    same tensor is compared with it. `zeros` is the share of elements that are zero although they
    should not be.
    """

    label: str = ""
    operation: Operation | None = None
    step: int = -1
    over: tuple[str, ...] = ()
    scale: float = 1.0
    others: tuple[SourceValue, ...] = ()
    zeros: float = 0.0
    rows: tuple[int, ...] = ()


OriginKind = Literal[
    "branch",
    "parallel",
    "cut",
    "value",
    "extra",
    "derivative",
    "part",
    "missing",
    "alone",
    "member",
    "collective",
    "condition",
    "definition",
    "made",
    "entered",
    "chosen",
    "repeated",
    "unused",
    "overwrites",
    "draw",
    "skipped",
    "configures",
]
"""Relation of a line to the first wrong operation, which comes later:

- `branch`: one device executes other lines of its function;
- `parallel`: so does it, and the line runs a collective or calls a function that one device does not execute;
- `cut`: its result passes no gradient, such as that of `detach`, where one device passes one;
- `value`: its inputs match, and its integers, masks or numbers differ;
- `extra`: one device does not run it, and its result enters the wrong one;
- `derivative`: it computes a gradient in user code, before the wrong one;
- `part`: it passes on a part of a sum, without a reduction;
- `missing`: right results of this kind pass its collective or are made by it, and this one is not;
- `alone`: right results of this kind do not pass it;
- `member`: it decides which elements a list has that the missing call takes;
- `collective`: it made an operand, or the first value of the ranks that is not one of one device;
- `condition`: it decides whether the missing call runs;
- `definition`: it defines a number, group, index or flag of the operation in Python;
- `made`: it made the tensor, or a weight that the operation uses, before the first step;
- `entered`: it calls a function that one device runs too, from a line that one device does not run;
- `chosen`: it decides which elements of a part of a sum are not zero;
- `repeated`: it adds values that are equal on all ranks, to a wrong multiple;
- `unused`: it is a collective of the step whose result nothing uses;
- `overwrites`: it writes over its own result of the same step, which nothing has read;
- `draw`: it draws random numbers, and one device does not;
- `skipped`: the condition or iterable of lines that one device executes, and no rank;
- `configures`: it configures the part of torch that runs the wrong operation.
"""


_OF_ONE_SIDE = ("branch", "skipped")
_OF_BRANCHES = ("definition", "cut", "extra", "made", "draw", "value")
"""Kinds of lines that are wrong by themselves if they are in a branch."""


class Origin(Record):
    """A line of user code from which a wrong result may come, and the line that calls its function.

    `here` is the Python value that the line defines on a rank, if it differs from the one `there`, on one device. One
    device does not run the line if it has no value. `outer` are further calls around `caller`, of a collective.
    With `is_branch`, ranks alone execute the line, in a function that one device executes, too.
    """

    kind: OriginKind
    line: CodeLine
    caller: CodeLine | None = None
    outer: tuple[CodeLine, ...] = ()
    here: str | None = None
    there: str | None = None
    is_branch: bool = False

    @property
    def is_of_ranks(self) -> bool:
        """Return whether one device does not execute the line, or no rank executes the lines under it."""
        is_defined = self.kind == "definition" and bool(self.here) and self.there is None
        return is_defined or self.kind in (*_OF_ONE_SIDE, "extra") or self._is_of_branch

    def has_factor(self, factor: float) -> bool:
        """Return whether the line defines a number that is `factor` times the one that it defines on one device."""
        try:
            here, there = float(self.here or ""), float(self.there or "")
        except ValueError:
            return False
        return self.kind == "definition" and there != 0.0 and math.isclose(here / there, factor, rel_tol=1e-6)

    @property
    def may_lead(self) -> bool:
        """Return whether the line is a branch of one side, in a function that both sides execute."""
        return self.kind in _OF_ONE_SIDE or self._is_of_branch

    @property
    def _is_of_branch(self) -> bool:
        return self.is_branch and self.kind in _OF_BRANCHES


def find_line_of_ranks(origins: Sequence[Origin]) -> Origin | None:
    """Return the first origin, if it alone is a line that one device does not execute."""
    alone = [each for each in origins if each.is_of_ranks]
    return alone[0] if len(alone) == 1 and alone[0] is origins[0] else None


def _is_beside(one: Origin, other: Origin) -> bool:
    return _is_of_function(one.line, other.line)


def _is_of_function(one: CodeLine, other: CodeLine) -> bool:
    return (one.file, one.function) == (other.file, other.function)


def find_lone_line(origins: Sequence[Origin]) -> Origin | None:
    """Return the first origin, if it alone is of one side, and in a function that both sides execute.

    A collective whose result nothing uses leads, too, if another value of its function is used.
    """
    if origins and origins[0].kind == "unused" and any(_is_beside(origins[0], each) for each in origins[1:]):
        return origins[0]
    alone = [each for each in origins if each.may_lead or each.kind == "extra"]
    # Other lines often replace some that ranks skip.
    alone = [each for each in alone if each.kind != "skipped"] or alone
    return alone[0] if len(alone) == 1 and alone[0] is origins[0] and alone[0].may_lead else None


class SumPart(Record):
    """A part with a wrong weight in a sum: the result of `ranks` counts the part of rank `source` `weight` times.

    The result is in `rows`, the first of the indices in dim 0, empty for all. If the part is of other rows,
    these are `source_rows`, and its right weight is 0; else it is 1.
    """

    ranks: tuple[int, ...]
    source: int
    weight: float
    rows: tuple[int, ...] = ()
    source_rows: tuple[int, ...] = ()


class Culprit(Record):
    """The first wrong operation: `here` on the ranks, and `there`, its counterpart on one device if any.

    In a race, `there` is the collective of the ranks that may still use the memory that `here` uses.

    `proved` means that the ranks' program was executed with the change that `mechanism` names. This change
    made the tensors in `repaired`, which the training loop exposes, correct up to the relative error
    `residual`. Without `names_cause`, it proves which value is wrong, not why. With `is_local`, the change
    corrects only the result of `here`, and more operations are wrong.

    `operand` is the index of the wrong operand; its value is `taken` and should be `right`. `made` is the
    operation of the rank that computed `taken`. For the mechanism `written` it is the operation that wrote
    the correct values before the first step, and for a group that is wrong wherever it is used the call that
    made it. A culprit without `ranks` only names the maker of a tensor;
    no rank has the indices `absent` of it, as (dim, first, stop). `numbers` are pairs of different numbers,
    (here, there). `moves` are the operations that moved an operand from its producer to `here`, and
    `moves_there` the ones on one device. `others` are more lines with the same mistake.

    `results` are the wrong results that the culprit explains; they are `factor` times the correct ones. In a
    reduction, `sums` are the parts with wrong weights; with weights 1 they add up to the correct result. Moved
    results may be a copy of `copy_of`, which is correct; shared ones have its memory. `rounds_to` is the
    narrow dtype of an operation that one device computes in float64.
    `leads` means that the report states this culprit as the cause, not as evidence for another one. If no
    change is proved, `between` has one operation per source line, from correct inputs to the first wrong
    result. `origins` are lines of user code before `here` from which its wrong operands, groups and numbers
    come.
    """

    mechanism: Mechanism
    proved: bool
    here: Operation
    there: Operation | None = None
    ranks: tuple[int, ...] = ()
    operand: int = -1
    taken: SourceValue | None = None
    made: Operation | None = None
    right: SourceValue | None = None
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
    sums: tuple[SumPart, ...] = ()
    copy_of: str = ""
    rounds_to: str = ""
    between: tuple[Operation, ...] = ()
    origins: tuple[Origin, ...] = ()
    absent: tuple[tuple[int, int, int], ...] = ()

    @property
    def is_line_shared(self) -> bool:
        """Return whether one device executes the line of `here` too, so that the line is right."""
        own, other = (None if each is None else each.line for each in (self.here, self.there))
        return own is not None and other is not None and (own.file, own.line) == (other.file, other.line)

    @property
    def multiplies(self) -> bool:
        """Return whether a line multiplies or divides by the factor of a scaled result."""
        operator = self.here.operator.rstrip("_")
        return self.mechanism == "scale" and operator in ("mul", "div") and self.here.line is not None

    @property
    def own_line(self) -> Origin | None:
        """The line that made a wrong value, if it is the only one before `here` that one device does not execute.

        With the right value, the program of the ranks is right. Both sides execute all other lines that make it. A
        wrong number needs a line that defines a number, which may pass it on to definitions that both sides execute;
        None is no number.
        """
        first = self.origins[0] if self.origins else None
        if self.mechanism == "scale" and first is not None and first.has_factor(self.factor):
            return first
        is_of_value = self.mechanism in _OF_VALUES and (self.there is None or self._is_made_elsewhere)
        alone = find_line_of_ranks(self.origins)
        if not (self.proved and is_of_value) or alone is None:
            return None
        if self.mechanism in _OF_NUMBERS:
            return alone if alone.kind == "definition" and alone.here != "None" else None
        return alone if alone.kind in ("branch", "extra") and len(self.origins) == 1 else None

    @property
    def lone_line(self) -> Origin | None:
        """`own_line`, or the only line before the first wrong result that one device does not execute.

        Lines that ranks leave out count in the functions that call the first wrong operation: right layouts leave
        out others.
        """
        found = self.own_line or find_lone_line(self.origins)
        if found is None or (found.kind == "unused" and self.names_cause):
            return None
        return found if found.kind != "skipped" or self._is_called_from(found.line) else None

    def _is_called_from(self, line: CodeLine) -> bool:
        """Return whether the function of a line calls the first wrong operation, or its counterpart."""
        calls = [each for op in (self.here, self.there) if op is not None for each in (op.line, *op.callers)]
        return any(each is not None and _is_of_function(each, line) for each in calls)

    @property
    def _is_made_elsewhere(self) -> bool:
        """Whether one device executes the line too, or the wrong operand has no counterpart in the same operator."""
        if self.mechanism != "operand":
            return self.is_line_shared
        is_same = self.there is None or self.there.operator.rstrip("_") == self.here.operator.rstrip("_")
        return self.is_line_shared or self.taken is None or not is_same

    @property
    def names_cause(self) -> bool:
        """Return whether the proved change is one of the code, not only of a value that was made elsewhere."""
        is_of_line = self.mechanism != "created" and not (self._is_made_elsewhere or self.is_measured)
        return self.proved and (self.own_line is not None or is_of_line)

    @property
    def is_measured(self) -> bool:
        """Whether neither a size of the layout nor a simple ratio explains the factor, which is only measured."""
        squares = (self.factor, self.factor * self.factor)  # such as the root of a width
        is_simple = any(math.isclose(_simplify(each), each, rel_tol=1e-9) for each in squares)
        return self.mechanism == "scale" and not (self.axes or is_simple)

    @property
    def code(self) -> Cause:
        """Return the cause to which this culprit belongs."""
        found = self._find_relation()
        if found is not None:
            return found
        if self.taken is not None and self.right is not None:
            if self.taken.rows != self.right.rows:
                return Cause.PERMUTATION
            if _is_stale(self.taken, self.right):
                return Cause.STALE
        if self.mechanism == "removed" and self.axes:  # a collective that one device does not need
            return Cause.COLLECTIVES
        if self.mechanism == "removed" and self.here.operator.endswith("_"):
            # A write that one device does not make.
            return Cause.PERMUTATION if self.here.operator.startswith(_INDEXED) else Cause.STATE
        return {"forward": Cause.FORWARD, "backward": Cause.BACKWARD, "step": Cause.OPTIMIZER}.get(
            self.here.phase, Cause.FORWARD
        )

    def _find_relation(self) -> Cause | None:
        """Return the cause that the relation of the results to correct values names, or None."""
        if self.copy_of and self.mechanism != "shared":
            return Cause.DUPLICATE
        if self.rounds_to:
            return Cause.ROUNDING
        if any(each.source_rows for each in self.sums):
            return Cause.COLLECTIVES
        if self.sums and len({each.weight for each in self.sums}) == 1 and self.sums[0].weight:
            return Cause.SCALE
        if any(each.weight or each.source in each.ranks for each in self.sums):
            return Cause.SHARE_WEIGHTS  # else each rank lacks only the parts of others
        is_rate = self.mechanism == "scale" and self.here.phase == "step"
        return None if is_rate else _CODES.get(self.mechanism)


def _simplify(number: float) -> float:
    """Return the nearest ratio of small numbers."""
    return float(Fraction(number).limit_denominator(_LARGEST)) if math.isfinite(number) else math.nan


def _is_stale(taken: SourceValue, right: SourceValue) -> bool:
    """Return whether both values have the same label, or come from the same operation in different steps."""
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
