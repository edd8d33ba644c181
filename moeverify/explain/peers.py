"""Edits in which the ranks of a ring receive from a rank at another distance, such as the opposite neighbor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch import Tensor

from moeverify.explain.counterparts import key_line
from moeverify.explain.edit import Edit
from moeverify.explain.joint import At, Changes, Execution, Joint
from moeverify.explain.program import Op
from moeverify.explain.regroup import Groups, name_ranks

RING = "ring"
"""First part of the place of an edit of a ring; the second is its mesh axis."""

Turn = tuple[At, ...]
"""One call on each rank of a ring, in group order: each receives a message."""


def list_peers(joint: Joint, groups: Groups, unknown: Sequence[At], state: Execution) -> Iterator[Edit]:
    """Yield edits in which all messages of one line come from ranks at another distance in their ring.

    The line of `unknown` operators counts with its caller, in one pass of a step. All ranks of each of its rings
    must receive equally often, from the same distance.
    """
    seen: set[object] = set()
    for op in unknown:
        place = _find_place(joint, op)
        if not _is_received(joint.op(op)) or place in seen:
            continue
        seen.add(place)
        turns = _list_turns(joint, place)
        apart = {_find_distance(joint.op(each), own) for turn in turns for own, each in enumerate(turn)}
        sizes = {len(turn) for turn in turns}
        if len(apart) != 1 or len(sizes) != 1:
            continue
        (mine,), (size,) = apart, sizes
        others = sorted(
            (each for each in range(1, size) if each != mine), key=lambda each: each != size - mine
        )
        for right in others:
            changes = _receive(joint, turns, mine, right, state)
            if changes is not None:
                meeting = joint.op(op).meeting
                axis = "" if meeting is None else name_ranks(groups, meeting.group.ranks)
                names = _name_rank(mine, size), _name_rank(right, size)
                ops = tuple(dict.fromkeys([op, *(each for turn in turns for each in turn)]))
                yield Edit("group", ops, changes, place=(RING, axis), numbers=(names,))


def _find_place(joint: Joint, op: At) -> object:
    """Return a key of the line, its caller, the step and the pass of an operator."""
    recorded, program = joint.op(op), joint.programs[op[0]]
    return key_line(program, recorded), recorded.step, program.sites_of(recorded)[1:2]


def _is_received(op: Op) -> bool:
    return op.meeting is not None and op.name.partition(".")[2] == "recv" and len(op.results) == 1


def _list_turns(joint: Joint, place: object) -> list[Turn]:
    """Return the calls at a place; empty if the ranks of a ring do not receive equally often."""
    rings: dict[tuple[int, ...], dict[int, list[At]]] = {}
    for rank, program in enumerate(joint.programs):
        for op in program.ops:
            at = (rank, op.number)
            if op.meeting is not None and _is_received(op) and _find_place(joint, at) == place:
                rings.setdefault(op.meeting.group.ranks, {}).setdefault(rank, []).append(at)
    found: list[Turn] = []
    for ranks, calls in rings.items():
        if len({len(calls.get(rank, ())) for rank in ranks}) != 1:
            return []
        found += zip(*(calls[rank] for rank in ranks), strict=True)
    return sorted(found, key=lambda turn: max(map(joint.place, turn)))


def _find_distance(op: Op, own: int) -> int:
    """Return by how many ranks of its group the sender of a message is before its receiver."""
    assert op.meeting is not None
    return (own - op.meeting.source) % len(op.meeting.group.ranks)


def _receive(joint: Joint, turns: Sequence[Turn], mine: int, right: int, state: Execution) -> Changes | None:
    """Return the messages that arrive from another distance; None if they have other sizes or were not kept.

    A later message depends on the earlier ones.
    """
    sent = {op: _find_sent(joint, op) for turn in turns for op in turn}
    done, changes = state, Changes()
    for number, turn in enumerate(turns):
        given: dict[At, Tensor] = {}
        for own, op in enumerate(turn):
            (result,) = joint.results(op)
            source = sent[turn[(own - right + mine) % len(turn)]]
            data = None if source is None else done.data(source)
            shape = joint.value(result).shape
            if data is None or data.numel() != math.prod(shape):
                return None
            given[result] = data.reshape(shape)
        later = [at for each in turns[number + 1 :] for op in each if (at := sent[op]) is not None]
        done = joint.execute(Changes(values=given), later, done)
        changes.values |= given
    return changes


def _find_sent(joint: Joint, op: At) -> At | None:
    """Return the value that the sender of a message sends."""
    senders = (each for each in joint.members(op) if each != op and joint.op(each).name.endswith(".send"))
    return next(((each[0], number) for each in senders for number in joint.op(each).refs()), None)


def _name_rank(distance: int, size: int) -> str:
    names = {1: "the rank before", size - 1: "the rank after"}
    return names.get(distance, f"the rank {distance} before")
