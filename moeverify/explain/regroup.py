"""Edits that execute a collective over the groups of another mesh axis, or a reduction that the ranks lack."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from moeverify.explain.align import Alignment
from moeverify.explain.chains import list_group, skip_moves
from moeverify.explain.edit import Edit
from moeverify.explain.joint import At, Changes, meet_over
from moeverify.explain.operators import NotExecutable

Groups = Mapping[str, Sequence[Sequence[int]]]
"""The rank groups of each mesh axis."""

REDUCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda parts: parts.sum(0),
    "maximum": lambda parts: parts.amax(0),
    "minimum": lambda parts: parts.amin(0),
    "mean": lambda parts: parts.double().mean(0),
}
"""Reductions over the ranks of a group, of their values stacked in dim 0."""
OF_OPERATORS = {"amax": "maximum", "max": "maximum", "amin": "minimum", "min": "minimum", "mean": "mean"}
"""Reductions that continue an operator over ranks. They are tried first: others may repair later results, too."""


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
    for axis, parts in (dict(groups) if widens else {**groups, "each rank alone": alone}).items():
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


def list_reductions(
    alignment: Alignment, groups: Groups, ops: Sequence[At], *, has_all: bool = False
) -> Iterator[Edit]:
    """Yield edits that reduce the results of operators, or the values that they take, over a mesh axis.

    First the values of all calls at a place are reduced, then those of the first call alone, as later calls may
    take its result. Values that are equal on the ranks of an axis need no reduction. With `has_all`, integers are
    reduced, too, and results of collectives over a further axis.
    """
    joint = alignment.joint
    taken = (skip_moves(joint, at) for at in joint.own_reads(ops[0]))
    for value in dict.fromkeys([*joint.results(ops[0]), *taken]):
        maker = joint.op(joint.maker(value))
        if (maker.meeting is not None and not has_all) or maker.step < 0:
            continue
        usual = OF_OPERATORS.get(maker.short, "sum")
        reductions = sorted(REDUCTIONS.items(), key=lambda each: each[0] != usual)
        every = alignment.siblings(value)
        first = [at for at in every if alignment.occurrence(at) == alignment.occurrence(value)]
        is_floating, known = joint.value(value).is_floating, alignment.find(value)
        is_of_mean = known is not None and known.is_of_mean
        for values in dict.fromkeys((tuple(every), tuple(first))) if is_floating or has_all else ():
            makers = tuple(map(joint.maker, values))
            for axis, parts in groups.items():
                for name, reduce in reductions:
                    if name == "sum" and is_of_mean:
                        continue
                    if changes := reduce_values(alignment, values, parts, reduce):
                        yield Edit("unreduced", makers, Changes(values=changes), numbers=((name, axis),))


def list_of_axes(alignment: Alignment, groups: Groups, ops: Sequence[At]) -> Iterator[Edit]:
    """Yield edits over mesh axes: of a collective's group, or of an operator that a reduction continues.

    A maximum over own columns is continued by a maximum over ranks.
    """
    yield from list_regroupings(alignment, groups, ops, widens=True)
    usual = OF_OPERATORS.get(alignment.joint.op(ops[0]).short)
    for each in list_reductions(alignment, groups, ops) if usual else ():
        if each.numbers[0][0] == usual and ops[0] in each.ops:
            yield each


def reduce_values(
    alignment: Alignment,
    values: Sequence[At],
    groups: Sequence[Sequence[int]],
    reduce: Callable[[Tensor], Tensor],
) -> dict[At, Tensor]:
    """Return values reduced over the ranks of their groups; empty if a rank has none, or if all of a group are equal.

    The sum of equal values is a multiple of one, and no reduction is missing.
    """
    at_place = {(alignment.occurrence(at), at[0]): alignment.data(at) for at in values}
    found: dict[At, Tensor] = {}
    is_same = True
    for at in values:
        own = alignment.data(at)
        ranks = next((group for group in groups if at[0] in group), ())
        parts = [at_place.get((alignment.occurrence(at), rank)) for rank in ranks]
        kept = [each for each in parts if each is not None and own is not None and each.shape == own.shape]
        if own is None or own.dtype == torch.bool or not ranks or len(kept) < len(ranks):
            return {}
        found[at] = reduce(torch.stack(kept)).to(own.dtype)
        is_same &= all(torch.equal(each, own) for each in kept)
    return {} if is_same else found


def name_ranks(groups: Groups, ranks: Sequence[int]) -> str:
    """Return the mesh axis that has a group of these ranks, or the ranks."""
    own = sorted(ranks)
    found = (axis for axis, parts in groups.items() if any(sorted(part) == own for part in parts))
    return next(found, f"ranks {', '.join(map(str, own))}")
