"""Alignment of the ranks' values with the single-device run: which values are right."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Self

import torch
from torch import Tensor

from moeverify.explain.content import are_among, has_same_numbers
from moeverify.explain.joint import At, Execution, Joint
from moeverify.explain.known import Key, Known, KnownValues
from moeverify.explain.ordering import list_sources_first
from moeverify.explain.program import BATCH, Program

_MOST_AFTER_SUM = 8


class Alignment(KnownValues):
    """Judgement of the ranks' values: a line must also compute the numbers that it computes on one device."""

    def __init__(self, joint: Joint, one: Program, scales: Sequence[float] = ()) -> None:
        super().__init__(joint, one, scales)
        self._origins: dict[At, frozenset[At]] = {}
        self._forget()

    def _forget(self) -> None:
        """Forget judgements, which depend on the values."""
        self._same: dict[Key, bool] = {}
        self._lacking: dict[tuple[Key, tuple[int, ...]], bool] = {}
        self._foreign: dict[At, bool] = {}
        self._parts: dict[At, bool] = {}
        self._numbers: dict[AbstractSet[At], Tensor] = {}

    def under(self, execution: Execution) -> Self:
        """Return the alignment of the values that `execution`, a run with changes, computes."""
        changed = super().under(execution)
        if changed is not self:
            changed._forget()
        return changed

    def without_scale(self, scale: float | None) -> Self:
        """Return an alignment in which multiples by `scale` of single-device values count as wrong."""
        changed = super().without_scale(scale)
        changed._forget()
        return changed

    def is_right(self, at: At) -> bool:
        """Return whether a value is known, is uninitialized memory or is an input of the batch."""
        known = self.find(at)
        if known is not None and not self._belongs(at, known):
            return False
        return known is not None or self.is_blank(at) or self.joint.value(at).label.startswith(BATCH)

    def _belongs(self, at: At, known: Known) -> bool:
        """Return whether a value has the elements and the scale that it has on one device, or was set by a change."""
        if self._wrong_scale is not None and math.isclose(known.scale, self._wrong_scale, rel_tol=1e-7):
            return False
        return self.is_set(at) or (self._has_same_elements(at, known) and not self._is_foreign(at))

    def _has_same_elements(self, at: At, known: Known) -> bool:
        """Return whether ranks compute the same elements as the single device at the same line and module.

        Each element of a rank must occur there on the single device, and together the ranks must have all
        of them. Return True where this cannot be decided: parts of sums, multiples, and lines that the single
        device does not run. Of moved values only the number of elements is compared.
        """
        op = self.joint.op(self.joint.maker(at))
        key = self.key(at)
        theirs = self._one_by_key.get(key)
        if op.phase != "forward" or theirs is None or known.ids is None or op.meeting is not None:
            return True
        if self.is_moved(at, op) and not _has_index(self.joint, at):
            return bool(known.over) or not self._lacks_elements(key, theirs, tuple(known.ids.shape))
        found = self._same.get(key)
        if found is None:
            found = self._same[key] = self._compare_elements(key, theirs)
        return found

    def _lacks_elements(self, key: Key, theirs: AbstractSet[int], shape: tuple[int, ...]) -> bool:
        """Return whether ranks have zeros at a place where one device has none, and lack its elements.

        Ranks own different elements, such as rows of a vocabulary, and add theirs up later, or never. Values of
        `shape` that one device has, too, lack elements where all ranks have zeros, others if they have too few.
        """
        if (key, shape) not in self._lacking:
            right = [each for number in theirs if (each := self.one.values[number].data) is not None]
            here = [
                data
                for at in self._by_key[key]
                if (data := self.data(at)) is not None and data.shape == shape
            ]
            same = [each for each in right if each.shape == shape]
            there = same or [each for each in right if _holds(tuple(each.shape), shape)]
            if same:
                is_short = bool(here) and not bool(torch.stack([each != 0 for each in here]).any(0).all())
            else:
                num_here, num_there = (
                    sum(int(each.count_nonzero()) for each in side) for side in (here, there)
                )
                is_short = num_here < num_there and not all(bool(each.all()) for each in here)
            self._lacking[key, shape] = is_short and bool(there) and all(bool(each.all()) for each in there)
        return self._lacking[key, shape]

    def _is_foreign(self, at: At) -> bool:
        """Return whether a moved value has numbers that the lines that computed them do not have on one device.

        A wrong line may return the result of another one, such as an update without its decay.
        """
        if at not in self._foreign:
            self._foreign[at] = False  # an operator may return its operand
            origins = self._list_origins(at)
            data = self.data(at)
            if data is not None and at not in origins and any(map(self._is_other, origins)):
                numbers = data.reshape(-1).to(torch.float64)
                right = self._list_numbers(origins)
                has_others = not bool(are_among(numbers[numbers != 0], right).all())
                self._foreign[at] = has_others or any(map(self._is_other, self._list_kept(at)))
        return self._foreign[at]

    def _list_kept(self, at: At) -> frozenset[At]:
        """Return the computed values all of whose elements a value has, such as those that `cat` joins."""
        return self._trace(at, self._list_whole, {})

    def _list_whole(self, at: At) -> list[At] | None:
        """Return the values that an operator may pass on whole to a value; None if it computes the value."""
        op = self.joint.op(self.joint.maker(at))
        is_joined = op.meeting is None or op.name.startswith("collective.all_gather")
        if not (is_joined and self.is_moved(at, op)) or _has_index(self.joint, at):
            return None
        size = math.prod(self.joint.value(at).shape)
        sources = self.joint.reads(self.joint.maker(at))
        return [each for each in sources if math.prod(self.joint.value(each).shape) <= size]

    def _list_origins(self, at: At) -> frozenset[At]:
        """Return the computed values whose elements a value has: itself, or those that moves passed on."""
        return self._trace(at, self._list_passed, self._origins)

    def _trace(
        self, at: At, sources: Callable[[At], Sequence[At] | None], found: dict[At, frozenset[At]]
    ) -> frozenset[At]:
        """Return the computed values behind a value, and add them to `found`; these have None as `sources`."""
        for each in list_sources_first(at, lambda value: sources(value) or (), found):
            passed = sources(each)
            # An operator may return its operand, which then has no origins yet.
            before = [found.get(source, frozenset()) for source in passed or ()]
            found[each] = frozenset([each]) if passed is None else frozenset().union(*before)
        return found[at]

    def _list_passed(self, at: At) -> list[At] | None:
        """Return the values whose elements a move or collective passes on; None for a computed value."""
        op = self.joint.maker(at)
        is_moved = self.joint.op(op).meeting is not None or self.is_moved(at, self.joint.op(op))
        return self.joint.reads(op) if is_moved else None

    def _is_other(self, at: At) -> bool:
        """Return whether the line that computed a value computes something else on one device."""
        op = self.joint.op(self.joint.maker(at))
        known = self._known.get(at)
        is_whole = known is None or not (known.over or known.scale != 1.0)
        return op.phase == "forward" and self.key(at) in self._one_by_key and is_whole and self.is_wrong(at)

    def _list_numbers(self, origins: AbstractSet[At]) -> Tensor:
        """Return the sorted numbers that lines may compute: those of one device, or else those of the ranks."""
        if origins not in self._numbers:
            data = []
            for at in origins:
                is_other = self._is_other(at)
                theirs = self._one_by_key[self.key(at)] if is_other else ()
                data += [self.one.values[number].data for number in theirs] if is_other else [self.data(at)]
            flat = [each.reshape(-1).to(torch.float64) for each in data if each is not None]
            self._numbers[origins] = torch.cat(flat).sort().values
        return self._numbers[origins]

    def _compare_elements(self, key: Key, theirs: AbstractSet[int]) -> bool:
        right = [self.one.values[number].data for number in theirs]
        mine = [at for at in self._by_key[key] if self._has_numbers(at) and not self.is_set(at)]
        known = [self.find(at) for at in mine]
        if not known or any(each is None for each in right):
            return True
        if any(each is None or each.ids is None or each.over or each.scale != 1.0 for each in known):
            return True
        sides = [[each for each in side if each is not None] for side in (map(self.data, mine), right)]
        shapes = {tuple(each.shape) for each in sides[0]}
        if any(self._lacks_elements(key, theirs, shape) for shape in shapes):
            return False
        is_taken = _has_index(self.joint, mine[0])
        return has_same_numbers(*sides, counts=is_taken)

    def _has_numbers(self, at: At) -> bool:
        data = self.data(at)
        return data is None or bool(data.any())

    def is_wrong(self, at: At) -> bool:
        """Return whether a value `tells`, is not known to be right, and is no right part of a wrong sum."""
        return self.tells(at) and not self.is_right(at) and not self.is_part_of_wrong(at)

    def is_part_of_wrong(self, at: At, depth: int = _MOST_AFTER_SUM) -> bool:
        """Return whether a value may be a right part of a sum that is wrong because of another part.

        Its operands are right, and the same line has computed another part from wrong operands. These must not
        come from the parts that the line has computed from right ones, as in a loop. `depth` is the maximum number
        of operators between the sum and the value.
        """
        if at not in self._parts and depth:
            self._parts[at] = False
            if self.find(at) is None and self.is_on_one_device(at) and not self._list_wrong(at, depth - 1):
                wrong = {each: self._list_wrong(each, depth - 1) for each in self.siblings(at)}
                first = {self.joint.maker(each) for each, operands in wrong.items() if not operands}
                before = (self.joint.list_before(operands) for operands in wrong.values() if operands)
                self._parts[at] = any(first.isdisjoint(each) for each in before)
        return self._parts.get(at, False)

    def _list_wrong(self, at: At, depth: int) -> list[At]:
        """Return the wrong operands of the operator that computes a value."""
        return [
            each
            for each in self.joint.needs(self.joint.maker(at))
            if self.tells(each) and not (self.is_right(each) or self.is_part_of_wrong(each, depth))
        ]

    def is_on_one_device(self, at: At) -> bool:
        """Return whether the single device also computes values at this place.

        Its number of values there must divide the rank's.
        """
        theirs = len(self._one_by_key.get(self.key(at), ()))
        return theirs > 0 and sum(each[0] == at[0] for each in self.siblings(at)) % theirs == 0


def _holds(whole: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether a part of a tensor may have this shape."""
    return len(whole) == len(shape) and all(size >= part for size, part in zip(whole, shape, strict=True))


def _has_index(joint: Joint, at: At) -> bool:
    """Return whether an operator moves elements to or from places that a tensor gives, as `embedding` does."""
    return any(not joint.value((at[0], number)).is_floating for number in joint.op(joint.maker(at)).reads())
