"""Missing sums: reductions over ranks without which a wrong operand is computed.

Counts, lengths and loads have no identity, so that a missing sum over ranks shows only where a later operation
takes a wrong operand. The values from which this operand is computed are reduced over each mesh axis.

In a sum of many terms, such as the squares of a norm, some terms may lack a reduction that others have.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence

from torch import Tensor

from moeverify.explain.align import Alignment
from moeverify.explain.chains import is_copied, list_chain, list_group, list_of_step, walk_back
from moeverify.explain.compare import is_right
from moeverify.explain.counterparts import OneDevice
from moeverify.explain.edit import Edit
from moeverify.explain.joint import At, Changes, Execution, Joint
from moeverify.explain.regroup import (
    OF_OPERATORS,
    REDUCTIONS,
    Groups,
    list_reductions,
    list_regroupings,
    reduce_values,
)
from moeverify.results.checks import Kind

_MOST = 12
"""Maximum number of operators before the operand whose results are reduced."""

_MOST_REDUCED = 6
"""Maximum number of operators from a tensor to its reduction, such as the sum of its squares."""


def list_missing_sums(alignment: Alignment, groups: Groups, edit: Edit, state: Execution) -> Iterator[Edit]:
    """Yield reductions of earlier values that give the operators of an edit the operands that it inserts.

    The results of collectives come first, executed over other ranks, then means and maxima, which reductions over
    ranks would continue, then the nearest values. Where a part of a sum is taken, only a collective may have made it
    over other ranks.
    """
    joint, wanted = alignment.joint, edit.changes.values
    first = next(iter(wanted), None)
    if edit.kind not in ("operand", "total") or first is None:
        return
    known, is_total = alignment.find(first), edit.kind == "total"
    is_moved = known is not None and known.ids is not None and not known.over
    if is_moved:  # elements of one device are in a wrong place, or zero
        yield from _list_completed(alignment, groups, first, wanted[first], state)
        return

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
        reductions = () if is_total else list_reductions(alignment, groups, [op], has_all=True)
        for each in itertools.chain(list_regroupings(alignment, groups, group, widens=True), reductions):
            usual = {"sum", OF_OPERATORS.get(recorded.short)} | ({"mean"} if is_part else set())
            if each.kind == "unreduced" and each.numbers[0][0] not in usual:
                continue
            done = joint.execute(each.changes, list(wanted), state)
            if all(at not in done.tainted and _is_same(done.data(at), right) for at, right in wanted.items()):
                yield each


def list_reduced(joint: Joint, ops: Sequence[At]) -> Iterator[str]:
    """Yield the names of gradients whose elements the operators of a rank reduce.

    A gradient may be shown after elementwise changes, such as the clip by the norm of all.
    """
    rank, marks = ops[0][0], joint.programs[ops[0][0]].marks
    shown = {(rank, each.value): mark for mark in marks if mark[1] == Kind.GRADIENT for each in marks[mark]}
    for op in ops:
        before = walk_back(joint, [op], joint.own_reads, _MOST_REDUCED)
        front = dict.fromkeys(at for each in before for at in joint.own_reads(each))
        for _ in range(_MOST_REDUCED):
            named = next((shown[at] for at in front if at in shown), None)
            if named is not None:
                yield "/".join(named[1:])
                break
            users = [(at, user) for at in front for user in joint.users.get(at, ())]
            made = ((at, each) for at, user in users for each in joint.results(user))
            front = dict.fromkeys(
                each for at, each in made if joint.value(each).shape == joint.value(at).shape
            )


def _list_completed(
    alignment: Alignment, groups: Groups, at: At, right: Tensor, state: Execution
) -> Iterator[Edit]:
    """Yield sums over ranks of the values from which a value was moved that lacks elements of other ranks."""
    joint, data = alignment.joint, alignment.data(at)
    if data is None or data.shape != right.shape or not bool(((data == 0) & (right != 0)).any()):
        return
    for op in list_chain(joint, [at]):
        for each in list_reductions(alignment, groups, [op]):
            if each.numbers[0][0] == "sum" and op in each.ops:
                done = joint.execute(each.changes, [at], state)
                if at not in done.tainted and _is_same(done.data(at), right):
                    yield each


def list_unreduced_terms(
    alignment: Alignment, one: OneDevice, groups: Groups, unknown: Sequence[At]
) -> Iterator[Edit]:
    """Yield edits that reduce the terms of wrong sums that are parts over a mesh axis, and reach an end as such.

    A term is a part if those of the ranks of a group add up to the one that the same line computes on one device.
    """
    joint, inside = alignment.joint, set(unknown)
    adding = [op for op in unknown if joint.op(op).short.rstrip("_") == "add"]
    taken = dict.fromkeys(at for op in adding for at in joint.own_reads(op))
    terms = [at for at in taken if joint.op(joint.maker(at)).short.rstrip("_") != "add"]
    open_ = [at for at in terms if _reaches_end(joint, at, inside)]
    for axis, parts in groups.items():
        totals = {at: total for at in open_ if (total := _add_up(alignment, one, at, parts)) is not None}
        if totals:
            ops = tuple(dict.fromkeys(map(joint.maker, totals)))
            names = tuple(list_reduced(joint, [op for op in ops if op[0] == ops[0][0]]))
            yield Edit("unreduced", ops, Changes(values=totals), place=names, numbers=(("sum", axis),))


def _reaches_end(joint: Joint, at: At, inside: Collection[At]) -> bool:
    """Return whether a value is passed on to an operator after which none follows, and to no collective."""
    waiting, seen = [at], set[At]()
    while waiting:
        users = [user for user in joint.users.get(waiting.pop(), ()) if user in inside]
        for user in users:
            results = joint.results(user)
            if joint.op(user).meeting is not None or user in seen:
                continue
            seen.add(user)
            if not any(each in inside for result in results for each in joint.users.get(result, ())):
                return True
            waiting += results
    return False


def _add_up(alignment: Alignment, one: OneDevice, at: At, groups: Sequence[Sequence[int]]) -> Tensor | None:
    """Return the sum of the parts of a value over the ranks of its group, if it is right, and the value is not."""
    theirs, occurrence = alignment.list_counterparts(at), alignment.occurrence(at)
    group = next((each for each in groups if at[0] in each), ())
    own = [each for each in alignment.siblings(at) if each[0] in group]
    parts = [each for each in own if alignment.occurrence(each) == occurrence]
    total = reduce_values(alignment, parts, [group], REDUCTIONS["sum"]).get(at)
    right = one.data(theirs[occurrence]) if occurrence < len(theirs) else None
    if total is None or right is None or total.shape != right.shape or not is_right(total, right):
        return None
    first = alignment.data(parts[0])
    return None if first is None or is_right(first, right) else total


def _is_part(alignment: Alignment, at: At) -> bool:
    """Return whether a value is a part of a sum over ranks, or its multiple: means of blocks add up to one."""
    known = alignment.find(at)
    return known is not None and bool(known.over)


def _is_same(data: Tensor | None, right: Tensor) -> bool:
    return data is not None and data.shape == right.shape and is_right(data.double(), right.double())
