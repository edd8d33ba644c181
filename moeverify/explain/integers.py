"""Edits that give a line of the ranks the integers or the mask that it computes on one device.

These decide which elements later operations take or hide, often in all layers. No single later operation shows then
that they are wrong, but with the right ones all results are right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moeverify.explain.align import Alignment
from moeverify.explain.counterparts import OneDevice, pair_tensors
from moeverify.explain.creation import name_elements
from moeverify.explain.cuts import list_batch_cuts, take
from moeverify.explain.describe import list_differences
from moeverify.explain.edit import Edit
from moeverify.explain.joint import At, Changes
from moeverify.explain.known import Key

_MOST = 4
"""Maximum number of lines whose integers are replaced."""


def list_integers(alignment: Alignment, one: OneDevice, unknown: Sequence[At]) -> Iterator[Edit]:
    """Yield edits of the first lines before `unknown` operators that make other integers or masks.

    Lines that only pass wrong ones on are left out. A rank should have the rows and positions of its batch, or all.
    """
    joint = alignment.joint
    before = joint.list_before([at for op in unknown for at in joint.results(op)])
    right, tainted = dict[At, tuple[int, Tensor]](), set[At]()
    found: dict[Key, dict[At, Tensor]] = {}
    for op in sorted(before, key=joint.place):
        results = joint.results(op)
        right |= {at: each for at in results if (each := _find_right(alignment, one, at)) is not None}
        if not tainted.isdisjoint(joint.reads(op)):
            tainted.update(results)
            continue
        for at in results:
            if at in right and not _is_equal(alignment.data(at), right[at][1]):
                tainted.update(results)
                if _is_made(alignment, one, at, *right[at]):
                    found.setdefault(alignment.key(at), {})[at] = right[at][1]
    for values in list(found.values())[:_MOST]:
        makers = {joint.maker(at): one.program.op_of(right[at][0]) for at in values}
        numbers = _compare(alignment, *next(iter(values.items())))
        yield Edit("created", tuple(makers), Changes(values=values), makers, numbers=(numbers,))


def _is_made(alignment: Alignment, one: OneDevice, at: At, number: int, right: Tensor) -> bool:
    """Return whether an operator makes wrong elements, and does not take them; `right` are those of value `number`.

    A move gives the right elements another order. Other operators take the integers and the numbers that they take
    on one device.
    """
    joint, data = alignment.joint, alignment.data(at)
    op = joint.maker(at)
    if data is not None and alignment.is_moved(at, joint.op(op)):
        return torch.equal(data.reshape(-1).sort().values, right.reshape(-1).sort().values)
    other = one.program.op_of(number)
    pairs = [
        pair for pair in pair_tensors(joint.op(op), other) if not joint.value((at[0], pair.mine)).is_floating
    ]
    is_same = not list_differences(joint.op(op), other)
    return is_same and all(
        _is_equal(
            alignment.data((at[0], pair.mine)),
            _take_part(alignment, one, (at[0], pair.mine), pair.theirs, at),
        )
        for pair in pairs
    )


def _is_equal(data: Tensor | None, right: Tensor | None) -> bool:
    return data is not None and right is not None and torch.equal(data, right)


def _find_right(alignment: Alignment, one: OneDevice, at: At) -> tuple[int, Tensor] | None:
    """Return the single device's value at the place of a value, and the part of it that a rank should have."""
    joint, value = alignment.joint, alignment.joint.value(at)
    op = joint.op(joint.maker(at))
    if value.is_floating or op.step < 0 or op.meeting is not None:
        return None
    theirs, occurrence = alignment.list_counterparts(at), alignment.occurrence(at)
    own = sum(each[0] == at[0] for each in alignment.siblings(at))
    number = theirs[0] if len(theirs) == 1 else theirs[occurrence] if len(theirs) == own else None
    part = None if number is None else _take_part(alignment, one, at, number, at)
    return None if number is None or part is None else (number, part)


def _take_part(alignment: Alignment, one: OneDevice, at: At, number: int, result: At) -> Tensor | None:
    """Return the part of a single-device value that a rank should have as `at` in the micro-batch of `result`."""
    data, whole = alignment.data(at), one.data(number)
    if data is None or whole is None or whole.dtype != data.dtype or whole.ndim != data.ndim:
        return None
    if whole.shape == data.shape:
        return whole
    program = alignment.joint.programs[at[0]]
    return take(whole, data.shape, list(list_batch_cuts(one.program, program, alignment.occurrence(result))))


def _compare(alignment: Alignment, at: At, right: Tensor) -> tuple[str, str]:
    """Return the first wrong elements of a value, and the right ones."""
    data = alignment.data(at)
    assert data is not None
    other = data != right
    return name_elements(data[other]), name_elements(right[other])
