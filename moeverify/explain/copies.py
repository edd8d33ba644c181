"""Copies of weights that operators use on the ranks, where one device uses the weight itself.

Such as a tied weight that was cloned. Its values are right in the first step, and the weight lacks its gradient.
"""

from __future__ import annotations

from moeverify.explain.align import Alignment
from moeverify.explain.chains import is_passing
from moeverify.explain.joint import At, Joint
from moeverify.explain.program import Mark

_MOST = 64
"""Maximum number of moves between a weight and an operator that uses it."""


def list_copies(alignment: Alignment, rank: int, mark: Mark) -> list[At]:
    """Return the operators of a rank that made copies of a parameter before the first step.

    `mark` names the parameter and the step in which the forward pass uses the copies.
    """
    one, joint = alignment.one, alignment.joint
    found: dict[At, None] = {}
    for op in one.ops:
        if (op.step, op.phase) != (mark[0], "forward") or not op.results:
            continue
        names = [one.base(number).label for number in op.reads()]
        for at in alignment.list_placed(op.results[0], rank) if mark[2] in names else ():
            for number, name in zip(joint.op(joint.maker(at)).reads(), names, strict=False):
                made = _find_made(joint, (rank, number)) if name == mark[2] else None
                if made is not None:
                    found[made] = None
    return list(found)


def _find_made(joint: Joint, at: At) -> At | None:
    """Return the operator that made a value before the first step, up to moves, if it has no name."""
    program = joint.programs[at[0]]
    for _ in range(_MOST):
        base = program.base(at[1])
        op = at[0], base.op
        if base.label or joint.op(op).step < 0:
            return None if base.label else op
        taken = joint.own_reads(op)
        if len(taken) != 1 or not is_passing(joint, op):
            return None
        at = taken[0]
    return None
