"""Edits that execute a collective over the groups of another mesh axis, with the ranks' own operands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from moeverify.explain.align import Alignment
from moeverify.explain.chains import list_group
from moeverify.explain.edits import Edit
from moeverify.explain.joint import At, Changes, meet_over
from moeverify.explain.operators import NotExecutable

Groups = Mapping[str, Sequence[Sequence[int]]]
"""The rank groups of each mesh axis."""


def list_regroupings(
    alignment: Alignment, groups: Groups, ops: Sequence[At], *, widens: bool = False
) -> Iterator[Edit]:
    """Yield edits that give the collectives at one place other groups: of each mesh axis, or each rank alone.

    With `widens`, all calls there with wrong results are changed, or else `ops` alone, as later calls may take their
    results; no rank is alone, as that would leave the collective out. A rank that was not in the group of an
    operator takes part with its own call.
    """
    joint, first = alignment.joint, ops[0]
    meeting = joint.op(first).meeting
    if meeting is None or not joint.op(first).results:
        return
    mine = name_ranks(groups, meeting.group.ranks)
    every = list_group(alignment, first)
    choices = {tuple(ops): None}
    if widens:
        wrong = (at for at in every if at in ops or not all(map(alignment.is_right, joint.results(at))))
        choices = {tuple(wrong): None, **choices}
    alone = [[rank] for rank, _ in enumerate(joint.programs)]
    for axis, parts in (dict(groups) if widens else {**groups, "no other rank": alone}).items():
        for changed in choices if axis != mine else ():
            if (changes := _regroup(alignment, every, changed, parts)) is not None:
                yield Edit("group", changed, changes, numbers=((mine, axis),))


def _regroup(
    alignment: Alignment, calls: Sequence[At], changed: Sequence[At], groups: Sequence[Sequence[int]]
) -> Changes | None:
    """Return the results of some calls over other groups, or None if a rank of a group has no call at the place."""
    joint = alignment.joint
    at_place = {(alignment.occurrence(joint.results(at)[0]), at[0]): at for at in calls}
    changes = Changes()
    for at in changed:
        occurrence = alignment.occurrence(joint.results(at)[0])
        ranks = next((group for group in groups if at[0] in group), ())
        members = [at_place[key] for rank in ranks if (key := (occurrence, rank)) in at_place]
        if not ranks or len(members) < len(ranks):
            return None
        try:
            made = meet_over(joint, at, members, alignment.data)
        except NotExecutable:
            return None
        changes.values |= zip(joint.results(at), made, strict=True)
    return changes


def name_ranks(groups: Groups, ranks: Sequence[int]) -> str:
    """Return the mesh axis that has a group of these ranks, or the ranks."""
    own = sorted(ranks)
    found = (axis for axis, parts in groups.items() if any(sorted(part) == own for part in parts))
    return next(found, f"ranks {', '.join(map(str, own))}")
