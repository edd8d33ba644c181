"""Edits of a process group that has wrong ranks: all of its collectives in a step are executed over a mesh axis.

A group made over a wrong axis is wrong wherever it is used. Later collectives take results of earlier ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from moeverify.explain.align import Alignment
from moeverify.explain.chains import list_group
from moeverify.explain.edit import Edit
from moeverify.explain.joint import At, Changes, Execution, Joint, meet_over
from moeverify.explain.operators import NotExecutable
from moeverify.explain.program import GroupRef
from moeverify.explain.regroup import Groups

EVERYWHERE = "everywhere"
"""Place of an edit of all collectives of a group."""

_MOST = 500
"""Maximum number of collectives of a group that are executed again."""


def widen(alignment: Alignment, groups: Groups, edit: Edit, state: Execution) -> Edit | None:
    """Return the edit that gives all collectives of a group the ranks that `edit` gives those at one place.

    Return None if no others use the group, or if one cannot be executed over these ranks.
    """
    joint, first = alignment.joint, edit.ops[0]
    meeting = joint.op(first).meeting
    if edit.kind != "group" or edit.place or meeting is None or edit.numbers[0][1] not in groups:
        return None
    made = _find_makers(joint, first[0], meeting.group)
    every = [
        (rank, op.number)
        for rank, program in enumerate(joint.programs)
        for op in program.ops
        if op.meeting is not None and op.step >= 0 and _find_makers(joint, rank, op.meeting.group) == made
    ]
    turns = _list_turns(alignment, every)
    if len(every) > _MOST or all(op in edit.ops for op in every):
        return None
    changes = _execute(joint, turns, groups[edit.numbers[0][1]], state)
    ops = tuple(dict.fromkeys([*edit.ops, *every]))
    return None if changes is None else replace(edit, ops=ops, changes=changes, place=(EVERYWHERE,))


def _find_makers(joint: Joint, rank: int, group: GroupRef) -> Hashable:
    """Return the calls that made a group, or its ranks if none was recorded."""
    sites = joint.programs[rank].groups.get(group.name)
    return tuple(tuple((site.file, site.line) for site in each) for each in sites) if sites else group.ranks


def _list_turns(alignment: Alignment, ops: Sequence[At]) -> list[dict[int, At]]:
    """Return the collectives by rank, those together that are the same call at the same place of the program."""
    joint = alignment.joint
    turns: dict[Hashable, dict[int, At]] = {}
    for op in ops:
        results = joint.results(op)
        if results:
            key = (list_group(alignment, op)[0], alignment.occurrence(results[0]))
            turns.setdefault(key, {})[op[0]] = op
    return sorted(turns.values(), key=lambda turn: max(map(joint.place, turn.values())))


def _execute(
    joint: Joint, turns: Sequence[dict[int, At]], groups: Sequence[Sequence[int]], state: Execution
) -> Changes | None:
    """Return the results of collectives over other groups, each executed after those before it; None if one fails."""
    done, changes = state, Changes()
    for number, turn in enumerate(turns):
        given = Changes()
        for rank, op in turn.items():
            members = [turn[each] for group in groups if rank in group for each in group if each in turn]
            if len(members) < max(2, *(len(group) for group in groups if rank in group)):
                return None
            try:
                made = meet_over(joint, op, members, done.data)
            except NotExecutable:
                return None
            given.values |= zip(joint.results(op), made, strict=True)
        later = [at for each in turns[number + 1 :] for op in each.values() for at in joint.own_reads(op)]
        done = joint.execute(given, later, done)
        changes = changes | given
    return changes
