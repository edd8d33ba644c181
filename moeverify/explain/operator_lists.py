"""Lists of a recorded program's operators in one step, with the values of their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from moeverify.explain.describe import read_expression, shorten
from moeverify.explain.program import BATCH, SETUP, Op, Program, Site
from moeverify.results.operator_table import CallSite, Operator, OperatorList, OperatorResult, Phase

MOST_OPERATORS = 20_000
"""Maximum number of operators in the list of one process."""

_MOST_SITES = 3


@dataclass
class Listed:
    """Operators of one process in one step, with the values of their results.

    All sequences are in the order of `operators`:

    - `data`: the results of each operator; None for results that were not kept.
    - `taken`: the (operator, result) pairs that each operator takes, or takes views of, if they are listed.
    - `numbers`: the numbers of the result values in the recorded program.
    - `ops`: the numbers of the operators in the recorded program.
    """

    operators: OperatorList
    data: Sequence[Sequence[Tensor | None]]
    taken: Sequence[Sequence[tuple[int, int]]]
    numbers: Sequence[Sequence[int]] = ()
    ops: Sequence[int] = ()

    @cached_property
    def places(self) -> dict[int, int]:
        """The position in the list of each operator of the recorded program."""
        return {number: place for place, number in enumerate(self.ops)}


def list_operators(program: Program, step: int) -> Listed:
    """Return the operators of a step of a program, up to `MOST_OPERATORS`."""
    found = [op for op in program.ops if op.step == step]
    kept = found[:MOST_OPERATORS]
    places = {op.number: place for place, op in enumerate(kept)}
    last = max((op.number for op in kept if op.phase == "backward"), default=None)
    sites: dict[Site, int] = {}
    operators = [
        Operator(
            name=_name(op),
            phase=_find_phase(op, last),
            module=op.module,
            sites=tuple(sites.setdefault(site, len(sites)) for site in program.sites_of(op)[:_MOST_SITES]),
            results=tuple(_describe_result(program, number) for number in op.results),
            inputs=tuple(_describe_input(program, number, places) for number in op.refs()),
            origin=places.get(op.origin, -1),
            ranks=() if op.meeting is None else op.meeting.group.ranks,
            axis="" if op.meeting is None else op.meeting.group.axis,
        )
        for op in kept
    ]
    listed = OperatorList(
        sites=tuple(map(_describe_site, sites)),
        operators=tuple(operators),
        left_out=len(found) - len(kept),
    )
    numbers = [op.results for op in kept]
    data = [[program.values[number].data for number in each] for each in numbers]
    makers = {
        number: (place, slot) for place, results in enumerate(numbers) for slot, number in enumerate(results)
    }
    taken = [_list_taken(program, op, makers) for op in kept]
    return Listed(listed, data, taken, numbers, [op.number for op in kept])


def _list_taken(program: Program, op: Op, makers: Mapping[int, tuple[int, int]]) -> list[tuple[int, int]]:
    found = {number: None for each in op.refs() for number in (each, program.base(each).number)}
    return [makers[number] for number in found if number in makers]


def _name(op: Op) -> str:
    """Return the name of an operator without torch's namespace."""
    return op.name.removeprefix("aten.")


def _find_phase(op: Op, last: int | None) -> Phase:
    """Return the part of the step. Operators after the last derivative belong to the optimizer."""
    if op.step == SETUP:
        return "setup"
    if op.phase == "forward" and last is not None and op.number > last:
        return "step"
    return op.phase


def _describe_result(program: Program, number: int) -> OperatorResult:
    value = program.values[number]
    return OperatorResult(shape=value.shape, dtype=value.dtype)


def _describe_input(program: Program, number: int, places: dict[int, int]) -> int | str:
    """Return the position of the operator that made a value, or the name of the value."""
    made_by = program.values[number].op
    return places[made_by] if made_by in places else name_value(program, number)


def name_value(program: Program, number: int) -> str:
    """Return the label of a value, or the operator and step that computed it."""
    value = program.values[number]
    maker = program.ops[value.op]
    when = "before the first step" if maker.step == SETUP else f"of step {maker.step}"
    return value.label.removeprefix(BATCH) or f"{maker.short} {when}"


def _describe_site(site: Site) -> CallSite:
    return CallSite(
        file=shorten(site.file),
        line=site.line,
        function=site.function,
        expression=read_expression(site),
        offset=site.offset,
    )
