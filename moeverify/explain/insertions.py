"""Edits that insert a product or a sum which one device may have before an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from moeverify.explain.align import Alignment
from moeverify.explain.edit import Edit
from moeverify.explain.joint import At, Changes

_MOST_GROWN = 1 << 22
"""Maximum number of elements of a result that is larger than both of its operands."""


def list_insertions(alignment: Alignment, ops: Sequence[At], others: Sequence[At]) -> Iterator[Edit]:
    """Yield edits that multiply an operand by another value, or add this value, before an operator takes it.

    `others` are values on the rank of the first operator. Other operators use the values at the same
    places.
    """
    joint = alignment.joint
    for place, number in enumerate(joint.op(ops[0]).reads()):
        if alignment.find((ops[0][0], number)) is None:
            continue
        for other in others:
            for name, apply in (("mul", torch.mul), ("add", torch.add)):
                changes = Changes()
                for at in ops:
                    taken = list(joint.op(at).reads())
                    if place >= len(taken):
                        break
                    mine = taken[place]
                    theirs = _same_place(alignment, ops[0], other, at)
                    one, two = (
                        alignment.data((at[0], mine)),
                        None if theirs is None else alignment.data(theirs),
                    )
                    made = None if one is None or two is None else _apply(apply, one, two)
                    if made is None:
                        break
                    changes.values[at[0], mine] = made
                else:
                    yield Edit("inserted", tuple(ops), changes, {}, (place, name, other[1]))


def _same_place(alignment: Alignment, first: At, other: At, at: At) -> At | None:
    """Return the value on the rank of `at` that corresponds to `other` on the rank of the first operator."""
    if at == first:
        return other
    joint = alignment.joint
    order = [joint.maker(each) for each in alignment.siblings((first[0], joint.op(first).results[0]))]
    theirs = alignment.siblings(other)
    if at not in order or len(theirs) != len(order):
        return None
    return theirs[order.index(at)]


def _apply(apply: Callable[[Tensor, Tensor], Tensor], one: Tensor, two: Tensor) -> Tensor | None:
    """Return `apply(one, two)`, broadcasting `two` along rows if needed; the shape may grow."""
    for each in (two, two.unsqueeze(-1)):
        try:
            size = apply(one.to("meta"), each.to("meta")).numel()
            if size > max(one.numel(), each.numel(), _MOST_GROWN):
                continue  # flat parameters would make a matrix of their pairs
            made = apply(one, each)
        except RuntimeError:
            continue
        if made.ndim <= max(one.ndim, each.ndim):
            return made
    return None
