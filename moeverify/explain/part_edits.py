"""Edits of parts of sums: an operation takes a part where one device has the sum, or a whole beside a part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from moeverify.explain.align import Alignment
from moeverify.explain.chains import list_chain, skip_moves
from moeverify.explain.counterparts import OneDevice
from moeverify.explain.edit import Edit
from moeverify.explain.joint import At, Changes, Joint


def list_part_edits(alignment: Alignment, one: OneDevice, ops: Sequence[At]) -> Iterator[Edit]:
    """Yield edits of the operands of operators at one place of the program."""
    yield from _list_totals(alignment, one, ops)
    yield from _list_moved_totals(alignment, one, ops)
    yield from _list_shares(alignment, ops)


def _list_totals(alignment: Alignment, one: OneDevice, ops: Sequence[At]) -> Iterator[Edit]:
    """Yield edits that replace an operand, a part of a sum over ranks or micro-batches, by the total."""
    joint = alignment.joint
    for place in range(max((len(list(joint.op(at).reads())) for at in ops), default=0)):
        changes = Changes()
        for at in ops:
            for number in list(joint.op(at).reads())[place : place + 1]:
                total = _find_total(alignment, one, (at[0], number))
                if total is not None:
                    changes.values[at[0], number] = total
        if changes.values:
            yield Edit("total", tuple(ops), changes, {}, (place,))


def _list_moved_totals(alignment: Alignment, one: OneDevice, ops: Sequence[At]) -> Iterator[Edit]:
    """Yield edits that replace parts of sums by the totals in all calls of the line that cuts an operand from one."""
    joint, seen = alignment.joint, set[object]()
    for at in joint.own_reads(ops[0]):
        source, moves = skip_moves(joint, at), list_chain(joint, [at])
        cut = next((each for each in moves if source in joint.own_reads(each)), None)
        line = None if cut is None else _line(joint, cut)
        if line is None or line in seen or _find_total(alignment, one, source) is None:
            continue
        seen.add(line)
        changes, cuts = Changes(), dict[At, None]()
        ops_of_ranks = (
            (rank, op.number) for rank, program in enumerate(joint.programs) for op in program.ops
        )
        for op in (each for each in ops_of_ranks if _line(joint, each) == line):
            for taken in joint.own_reads(op):
                total = _find_total(alignment, one, taken)
                if total is not None:
                    changes.values[taken] = total
                    cuts[op] = None
        if cuts:
            yield Edit("total", tuple(cuts), changes, {}, (0,))


def _line(joint: Joint, op: At) -> object:
    recorded = joint.op(op)
    return recorded.step, recorded.phase, recorded.name, joint.programs[op[0]].sites_of(recorded)[:1]


def _find_total(alignment: Alignment, one: OneDevice, at: At) -> Tensor | None:
    """Return the sum of which a value is a part, or None if it is no part."""
    known = alignment.find(at)
    if known is None or not known.over or known.ids is None or not bool(known.ids.any()):
        return None
    return one.elements.pick(known.ids) * known.scale


def _list_shares(alignment: Alignment, ops: Sequence[At]) -> Iterator[Edit]:
    """Yield edits that divide an operand by the number of ranks if it meets a part of a sum on each rank."""
    joint = alignment.joint
    for place in range(max((len(list(joint.op(at).reads())) for at in ops), default=0)):
        changes = Changes()
        for at in ops:
            numbers = list(joint.op(at).reads())
            known = {number: alignment.find((at[0], number)) for number in numbers}
            parts = [each.over for each in known.values() if each is not None and each.over]
            mine = numbers[place] if place < len(numbers) else -1
            data = alignment.data((at[0], mine)) if mine >= 0 else None
            if parts and data is not None and alignment.tells((at[0], mine)):
                here = known[mine]
                if here is None or not here.over:
                    changes.values[at[0], mine] = data / len({rank for rank, _ in parts[0]})
        if changes.values:
            yield Edit("share", tuple(ops), changes, {}, (place,))
