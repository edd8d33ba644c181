"""Missing sums: reductions over ranks without which a wrong operand is computed.

Counts, lengths and loads have no identity, so that a missing sum over ranks shows only where a later operation
takes a wrong operand. The values from which this operand is computed are reduced over each mesh axis.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from torch import Tensor

from moeverify.explain.align import Alignment
from moeverify.explain.chains import is_copied, list_group, list_of_step, walk_back
from moeverify.explain.compare import is_right
from moeverify.explain.edit import Edit
from moeverify.explain.joint import At, Execution
from moeverify.explain.regroup import OF_OPERATORS, Groups, list_reductions, list_regroupings

_MOST = 12
"""Maximum number of operators before the operand whose results are reduced."""


def list_missing_sums(alignment: Alignment, groups: Groups, edit: Edit, state: Execution) -> Iterator[Edit]:
    """Yield reductions of earlier values that give the operators of an edit the operands that it inserts.

    The results of collectives come first, executed over other ranks, then means and maxima, which reductions over
    ranks would continue, then the nearest values.
    """
    joint, wanted = alignment.joint, edit.changes.values
    first = next(iter(wanted), None)
    known = alignment.find(first) if edit.kind == "operand" and first is not None else None
    is_moved = known is not None and known.ids is not None and not known.over
    if edit.kind != "operand" or first is None or is_moved:
        return  # elements of one device are in a wrong place, and no sum is missing

    def reads(op: At) -> list[At]:
        taken = list_of_step(joint, joint.own_reads(op))
        # A part of a sum is right by itself, and may be what is not summed.
        return [
            at
            for at in taken
            if _is_part(alignment, at) or not (alignment.tells(at) and alignment.is_right(at))
        ]

    ops = list(walk_back(joint, [joint.maker(first)], reads, _MOST))
    for op in sorted(
        ops, key=lambda op: (joint.op(op).meeting is None, joint.op(op).short not in OF_OPERATORS)
    ):
        recorded = joint.op(op)
        if recorded.meeting is None and any(is_copied(joint, at) for at in joint.results(op)):
            continue
        group, is_part = list_group(alignment, op), any(_is_part(alignment, at) for at in joint.results(op))
        for each in itertools.chain(
            list_regroupings(alignment, groups, group, widens=True),
            list_reductions(alignment, groups, [op], has_all=True),
        ):
            usual = {"sum", OF_OPERATORS.get(recorded.short)} | ({"mean"} if is_part else set())
            if each.kind == "unreduced" and each.numbers[0][0] not in usual:
                continue
            done = joint.execute(each.changes, list(wanted), state)
            if all(at not in done.tainted and _is_same(done.data(at), right) for at, right in wanted.items()):
                yield each


def _is_part(alignment: Alignment, at: At) -> bool:
    """Return whether a value is a part of a sum over ranks, or its multiple: means of blocks add up to one."""
    known = alignment.find(at)
    return known is not None and bool(known.over)


def _is_same(data: Tensor | None, right: Tensor) -> bool:
    return data is not None and data.shape == right.shape and is_right(data.double(), right.double())
