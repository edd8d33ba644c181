"""Edits of parts of sums: an operation takes a part where one device has the sum, or a whole beside a part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moeverify.explain.align import Alignment
from moeverify.explain.counterparts import OneDevice
from moeverify.explain.edit import Edit
from moeverify.explain.joint import At, Changes
from moeverify.explain.sites import is_of_hook


def list_part_edits(alignment: Alignment, one: OneDevice, ops: Sequence[At]) -> Iterator[Edit]:
    """Yield edits of the operands of operators at one place of the program.

    FSDP itself adds up the parts that its operators take.
    """
    if is_of_hook(alignment.joint.sites(ops[0])):
        return
    yield from _list_totals(alignment, one, ops)
    yield from _list_shares(alignment, ops)


def _list_totals(alignment: Alignment, one: OneDevice, ops: Sequence[At]) -> Iterator[Edit]:
    """Yield edits that replace an operand, a part of a sum over ranks or micro-batches, by the total."""
    joint = alignment.joint
    for place in range(max((len(list(joint.op(at).reads())) for at in ops), default=0)):
        changes = Changes()
        for at in ops:
            for number in list(joint.op(at).reads())[place : place + 1]:
                known = alignment.find((at[0], number))
                if known is None or not known.over or known.ids is None or known.is_of_mean:
                    continue
                if bool(known.ids.any()):
                    changes.values[at[0], number] = one.elements.pick(known.ids) * known.scale
        if changes.values:
            yield Edit("total", tuple(ops), changes, {}, (place,))


def _list_shares(alignment: Alignment, ops: Sequence[At]) -> Iterator[Edit]:
    """Yield edits that divide an operand by the number of ranks if it meets a part of a sum on each rank."""
    joint = alignment.joint
    for place in range(max((len(list(joint.op(at).reads())) for at in ops), default=0)):
        changes = Changes()
        for at in ops:
            numbers = list(joint.op(at).reads())
            over = {number: alignment.list_parts((at[0], number)) for number in numbers}
            parts = [each for each in over.values() if each]
            mine = numbers[place] if place < len(numbers) else -1
            data = alignment.data((at[0], mine)) if mine >= 0 else None
            if parts and data is not None and alignment.tells((at[0], mine)) and not over[mine]:
                changes.values[at[0], mine] = data / len({rank for rank, _ in parts[0]})
        if changes.values:
            yield Edit("share", tuple(ops), changes, {}, (place,))
