"""A wrong operand that the same line computes with another number on one device."""

from __future__ import annotations

from dataclasses import replace

from moeverify.explain.align import Alignment
from moeverify.explain.cause import OperatorCause
from moeverify.explain.chains import multiplies, skip_moves
from moeverify.explain.compare import is_right
from moeverify.explain.counterparts import Counterparts, OneDevice, find_pair, pair_tensors
from moeverify.explain.describe import list_differences
from moeverify.explain.edit import Edit
from moeverify.explain.joint import At
from moeverify.explain.program import Op


def name_number(alignment: Alignment, one: OneDevice, cause: OperatorCause) -> OperatorCause:
    """Return the cause as a wrong number, if its operand is made on the line that makes the right one.

    A multiplication by 1 changes nothing, so that its result is a right value, and only its reader seems wrong.
    The inputs of both operators must match.
    """
    edit = cause.repairs[0] if cause.repairs else None
    if edit is None or edit.other is None or edit.kind not in ("operand", "whole"):
        return cause
    pair = find_pair(alignment.joint.op(cause.ops[0]), edit.other, edit.place)
    if pair is None:
        return cause
    found = {}
    for at in edit.changes.values:
        maker, other = alignment.joint.maker(skip_moves(alignment.joint, at)), one.program.op_of(pair.theirs)
        if not _is_alike(alignment, one, maker, other):
            return cause
        found[maker] = other
    changed = Edit("number", tuple(found), edit.changes, found)
    return replace(cause, ops=list(found), repairs=[changed])


def find_alike(alignment: Alignment, one: OneDevice, op: At) -> Op | None:
    """Return the operator of one device that takes other numbers on the same line, or None."""
    if not multiplies(alignment.joint, op):
        return None
    others = Counterparts(alignment, one).find(op)
    return next((each for each in others if _is_alike(alignment, one, op, each)), None)


def _is_alike(alignment: Alignment, one: OneDevice, mine: At, other: Op) -> bool:
    """Return whether two operators of one line differ in their numbers alone."""
    joint, op = alignment.joint, alignment.joint.op(mine)
    sites = joint.sites(mine)[:1]
    is_same = op.short == other.short and bool(sites) and sites == one.program.sites_of(other)[:1]
    if not is_same or op.meeting is not None or op.step < 0 or not list_differences(op, other):
        return False
    for pair in pair_tensors(op, other):
        own, right = joint.data((mine[0], pair.mine)), one.data(pair.theirs)
        if own is not None and right is not None and is_right(own, right):
            continue  # a few numbers, such as positions, are equal but not known
        known = alignment.find((mine[0], pair.mine))
        if known is None or known.ids is None or known.scale != 1.0:
            return False
        if not one.holds(pair.theirs, known.ids):
            return False
    return True
