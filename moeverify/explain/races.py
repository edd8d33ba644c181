"""Races: uses of memory that a collective may still be using, and writes to memory that a backward pass needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from moeverify.explain.align import Alignment
from moeverify.explain.cause import OperatorCause
from moeverify.explain.joint import At, Joint
from moeverify.explain.program import HIDDEN, Op, Program
from moeverify.explain.suspects import Target


def list_races(alignment: Alignment, step: int, results: Sequence[Target]) -> Iterator[OperatorCause]:
    """Yield races that a result depends on, up to `step`. `results` are the wrong ones, or all if none is wrong."""
    joint = alignment.joint
    for rank, program in enumerate(joint.programs):
        for race in program.races:
            if race.is_direct and program.ops[race.op].step <= step and race.other < len(program.ops):
                first, other = (rank, race.op), (rank, race.other)
                if reached := _list_reached(joint, {first, other}, results):
                    yield OperatorCause([other], [], reached, known="race", launch=first)
        for op in program.ops:
            overwritten = _find_overwritten(alignment, rank, op) if op.step == step else None
            if overwritten is not None and (reached := _list_reached(joint, {(rank, op.number)}, results)):
                first = (rank, op.origin)
                yield OperatorCause([overwritten], [], reached, known="overwritten", launch=first)


def _list_reached(joint: Joint, ops: set[At], results: Sequence[Target]) -> list[Target]:
    """Return the results that some of the operators come before."""
    return [each for each in results if any(ops & joint.list_before([at]) for at in each.values.values())]


def _find_overwritten(alignment: Alignment, rank: int, op: Op) -> At | None:
    """Return the operator that wrote to an operand of a forward operator before its backward pass `op` took it.

    Autograd refuses most such writes. It does not see those through `.data`, or to a received buffer.
    """
    program = alignment.joint.programs[rank]
    if op.phase != "backward" or op.origin < 0 or not op.results:
        return None
    forward = program.ops[op.origin]
    saved = {program.values[number].place: number for number in (*forward.reads(), *forward.results)}
    for place, number in enumerate(op.reads()):
        taken = program.values[number]
        before = None if taken.place is None else saved.get(taken.place)
        if before is None or before == number or not _is_saved(alignment, rank, op, place):
            continue
        writer = _find_writer(program, number, after=forward.number)
        one, two = taken.data, program.values[before].data
        if writer is not None and one is not None and two is not None and not torch.equal(one, two):
            return rank, writer
    return None


def _is_saved(alignment: Alignment, rank: int, op: Op, place: int) -> bool:
    """Return whether one device takes an operand or a result of the forward operator there, and no gradient."""
    one = alignment.one
    for number in alignment.list_counterparts((rank, op.results[0])):
        other = one.op_of(number)
        forward = one.ops[other.origin] if other.origin >= 0 else other
        taken = list(other.reads())
        if place < len(taken) and taken[place] in (*forward.reads(), *forward.results):
            return True
    return False


def _find_writer(program: Program, number: int, *, after: int) -> int | None:
    """Return the operator that wrote a value, or its last part, after an operator; None if none was recorded."""
    maker = program.op_of(number)
    written = [number] if maker.short not in HIDDEN else list(maker.reads())
    found = [program.values[each].op for each in written if program.values[each].op > after]
    return max(found, default=None)
