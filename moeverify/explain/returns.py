"""Edits for a module that returns another value than on the single device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from moeverify.explain.align import Alignment
from moeverify.explain.counterparts import OneDevice
from moeverify.explain.cuts import take
from moeverify.explain.edit import Edit
from moeverify.explain.edits import list_all_cuts
from moeverify.explain.joint import At, Changes
from moeverify.explain.landmarks import Landmarks
from moeverify.explain.operators import run
from moeverify.explain.program import Op


def list_returns(
    alignment: Alignment, one: OneDevice, landmarks: Landmarks, ops: Sequence[At]
) -> Iterator[Edit]:
    """Yield edits that replace a module's output, for its users outside, by the single device's output.

    `ops` compute outputs of the module that are known values but not the same output on the single device.
    """
    joint = alignment.joint
    ends = [end for op in ops for end in landmarks.list_ends(joint, op)]
    changes, others, is_used = Changes(), {}, False
    for end in ends:
        module, is_gradient, _ = landmarks.by_rank[end[0]][end[1]]
        found = None if is_gradient else _find_right(alignment, one, landmarks, end)
        mine = alignment.data(end)
        if found is None or mine is None:
            return
        changes.values[end], others[joint.maker(end)] = found
        for user in joint.users.get(end, ()):
            if _is_inside(joint.op(user).module, module):
                changes.ops[user] = _run_with(joint.op(user), end[1], mine)
            else:
                is_used = True
    if is_used:
        yield Edit("returned", tuple(ops), changes, others)


def _find_right(
    alignment: Alignment, one: OneDevice, landmarks: Landmarks, end: At
) -> tuple[Tensor, Op] | None:
    """Return the part of the single device's output that a rank should return, and its operator."""
    joint = alignment.joint
    known = alignment.find(end)
    if known is None or known.ids is None or known.over or known.scale != 1.0:
        return None
    cuts = list_all_cuts(alignment, one, joint.maker(end), one.program.op_of(one.roots(known.ids)[0]))
    for value in landmarks.list_right(end):
        data = one.data(value)
        part = None if data is None else take(data, joint.value(end).shape, cuts)
        if part is not None:
            return part, one.program.op_of(value)
    return None


def _is_inside(inner: str, module: str) -> bool:
    return not module or inner == module or inner.startswith(f"{module}.")


def _run_with(op: Op, number: int, data: Tensor) -> Callable[[Callable[[int], Tensor]], list[Tensor]]:
    """Return a replacement that runs an operator with other data for one operand."""
    return lambda lookup: run(op, lambda each: data if each == number else lookup(each))
