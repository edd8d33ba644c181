"""Comparison of a rank's values with those that the same line computes on one device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from moeverify.explain.align import Alignment
from moeverify.explain.chains import is_of_masks
from moeverify.explain.compare import is_right
from moeverify.explain.counterparts import OneDevice
from moeverify.explain.joint import At

_MASK_DEPTH = 16
_MOST_BLOCKS = 64


class Agreement:
    """Comparison of values with one device, also of integers and masks, which have no content of their own."""

    def __init__(self, alignment: Alignment, one: OneDevice) -> None:
        self._alignment, self._one, self._joint = alignment, one, alignment.joint

    def is_on_one_device(self, at: At) -> bool:
        """Return whether the same line computes a value on one device."""
        return bool(self._alignment.list_counterparts(at))

    def agrees(self, at: At) -> bool:
        """Return whether a value is one that the same line computes on one device, or a right one.

        It may be a block of it, or add up to it over the ranks.
        """
        data = self._alignment.data(at)
        if data is None or not data.numel() or self._joint.value(at).label:
            return True
        if self._alignment.tells(at) and not is_of_masks(self._joint, at, _MASK_DEPTH):
            return self._alignment.is_right(at)
        theirs = [self._one.data(number) for number in self._alignment.list_counterparts(at)]
        right = [each for each in theirs if each is not None]
        if not right:
            return self._alignment.is_right(at)
        blocks = {is_block(data, each, self._begins[at[0]]) for each in right}
        if True in blocks:
            return any(self._is_covered(at, each) for each in right)
        return blocks == {None} or self._adds_up(at, data, right)

    def _is_covered(self, at: At, whole: Tensor) -> bool:
        """Return whether the values of all ranks at this line may have all blocks of a value of one device."""
        found: set[tuple[int, ...]] = set()
        for each in self._alignment.siblings(at):
            data = self._alignment.data(each)
            blocks = None if data is None else list_blocks(data, whole, self._begins[each[0]])
            if blocks is None or data is None or data.shape != self._joint.value(at).shape:
                return True  # not comparable
            found |= blocks
        size = whole.numel() // math.prod(self._joint.value(at).shape)
        return size > _MOST_BLOCKS or len(found) == size

    def is_displaced(self, at: At) -> bool:
        """Return whether a value has right elements, but not those of a block that the same line computes."""
        mine, theirs = self._alignment.data(at), map(self._one.data, self._alignment.list_counterparts(at))
        blocks = {
            is_block(mine, each, self._begins[at[0]])
            for each in theirs
            if mine is not None and each is not None
        }
        return blocks == {False}

    def is_elsewhere(self, at: At, number: int) -> bool:
        """Return whether a value has elements of a value of one device in other places."""
        mine, theirs = self._alignment.data(at), self._one.data(number)
        known = self._alignment.find(at)
        if mine is None or theirs is None or known is None or known.ids is None:
            return False
        return self._one.holds(number, known.ids) and is_block(mine, theirs, self._begins[at[0]]) is False

    @cached_property
    def _begins(self) -> list[dict[tuple[int, int], int]]:
        """The first position of each rank, by (number of its positions, number of all), if it has a run of them."""
        held = [[list(positions) for _, positions in program.shares] for program in self._joint.programs]
        count = 1 + max((position for shares in held for each in shares for position in each), default=0)
        return [
            {
                (len(own), count): own[0]
                for own in shares[:1]
                if own == list(range(own[0], own[-1] + 1)) and all(each == own for each in shares)
            }
            for shares in held
        ]

    def _adds_up(self, at: At, data: Tensor, right: Sequence[Tensor]) -> bool:
        """Return whether the values of this line add up to those of one device, or to a known multiple."""
        same = [each for each in right if each.shape == data.shape]
        # Only gradients of a loss may be multiples: its scale depends on the number of ranks.
        is_gradient = self._joint.op(self._joint.maker(at)).phase != "forward"
        scales = self._alignment.scales if is_gradient else (1.0,)
        if any(is_right(data, each * scale) for each in same for scale in scales if each.is_floating_point()):
            return True
        parts = [self._alignment.data(each) for each in self._alignment.siblings(at)]
        if not (same and data.is_floating_point()):
            return False
        if any(each is None or each.shape != data.shape for each in parts):
            return False
        total = torch.stack([each for each in parts if each is not None]).sum(0)
        whole = torch.stack(same).sum(0)
        return any(is_right(total, whole * scale) for scale in scales)


def is_block(mine: Tensor, theirs: Tensor, begins: Mapping[tuple[int, int], int]) -> bool | None:
    """Return whether a tensor is one of the equal blocks of another; None if it cannot be one.

    `begins` has the index of the block along dims of some sizes, by (size of the block, size of the whole).
    """
    blocks = list_blocks(mine, theirs, begins)
    return None if blocks is None else bool(blocks)


def list_blocks(
    mine: Tensor, theirs: Tensor, begins: Mapping[tuple[int, int], int]
) -> set[tuple[int, ...]] | None:
    """Return the places of the equal blocks of a tensor that another one equals; None if it cannot be one."""
    if mine.shape != theirs.shape and mine.numel() == theirs.numel():
        return {()} if _is_equal(mine.reshape(-1), theirs.reshape(-1)) else None  # another view
    if mine.ndim != theirs.ndim or any(b % a for a, b in zip(mine.shape, theirs.shape, strict=True)):
        return None
    sizes = list(zip(mine.shape, theirs.shape, strict=True))
    starts = ((begins[each],) if each in begins else range(0, each[1], each[0]) for each in sizes)
    found = set()
    for place in itertools.islice(itertools.product(*starts), _MOST_BLOCKS):
        block = theirs
        for dim, start in enumerate(place):
            block = block.narrow(dim, start, mine.shape[dim])
        if _is_equal(mine, block):
            found.add(place)
    return found


def _is_equal(mine: Tensor, theirs: Tensor) -> bool:
    return is_right(mine, theirs) if mine.is_floating_point() else torch.equal(mine, theirs)
