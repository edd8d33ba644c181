"""Lines that scale a wrong result: operators that multiply by numbers, and the number that scales the loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from moeverify.explain.align import Alignment
from moeverify.explain.cause import OperatorCause
from moeverify.explain.chains import multiplies, walk_back
from moeverify.explain.counterparts import OneDevice
from moeverify.explain.joint import At
from moeverify.explain.program import Site, list_numbers
from moeverify.explain.suspects import Target
from moeverify.explain.user_lines import UserLines, make_origin
from moeverify.results.culprit import Origin

_MOST_SCALARS = 32
"""Maximum number of operators that compute the scale of a loss."""


class Scaling:
    """Search for the lines that scale a multiple of a right result, or the parts of a sum unequally."""

    def __init__(
        self, alignment: Alignment, one: OneDevice, lines: UserLines, right: Sequence[Target]
    ) -> None:
        self._alignment, self._one, self._joint, self._lines = alignment, one, alignment.joint, lines
        self._right = [each for each in right if each.mark[1] == "gradient" and each.tells()]

    @cached_property
    def _shared(self) -> set[At]:
        """Operators before a right gradient, which take no wrong number."""
        return set(self._joint.list_before(list(self._right[0].values.values()))) if self._right else set()

    def find(self, cause: OperatorCause, lineage: Sequence[At]) -> Iterator[Origin]:
        """Yield operators that multiply by numbers, and the lines of the numbers.

        `lineage` are the operators that carried the value of the wrong result, the last one first.
        """
        first = cause.ops[0]
        uneven = [at for at in self._joint.reads(first) if len(self._list_scales(at)) > 1]
        before = self._list_backward(first, uneven)
        if cause.known == "scale" or uneven:
            yield from self._list_numbers(before, lineage if cause.known == "scale" else ())
        elif self._joint.op(first).phase == "backward":
            yield from self._list_loss_scale(before, is_right=False)

    def _list_numbers(self, before: Sequence[At], lineage: Sequence[At]) -> Iterator[Origin]:
        """Yield definitions of the numbers of operators that multiply by numbers which one device does not have."""
        users: dict[At, tuple[Site, ...]] = {}
        for op in [*lineage, *before]:
            sites = self._lines.sites(op)
            if (
                sites
                and sites not in users.values()
                and multiplies(self._joint, op)
                and self._has_other_numbers(op)
            ):
                users[op] = sites
        own = [sites for op, sites in users.items() if op in lineage]
        others = [sites for op, sites in users.items() if op not in lineage and op not in self._shared]
        if not self._right:  # a wrong scale of the loss multiplies all gradients
            yield from self._list_loss_scale(before, is_right=True)
        for sites in [*others, *own]:
            yield from self._lines.define(sites)

    def _list_loss_scale(self, before: Sequence[At], *, is_right: bool) -> Iterator[Origin]:
        """Yield lines of ranks alone that compute a factor of the loss, the nearest to the loss first.

        `before` are operators of the backward pass; the first one differentiates the end of the loss. Values
        that one device has, too, count only with `is_right`: a reduction may need another one.
        """

        def reads(op: At) -> list[At]:
            return [at for at in self._joint.own_reads(op) if not self._joint.value(at).shape]

        ends = [(op[0], self._joint.op(op).origin) for op in before[:1]]
        for op in walk_back(self._joint, [end for end in ends if end[1] >= 0], reads, _MOST_SCALARS):
            made = self._joint.results(op)
            if is_right or not all(map(self._alignment.is_right, made)):
                sites = self._lines.sites(op)
                if sites and self._lines.is_parallel(sites[0]):
                    yield make_origin("extra", sites)

    def _list_scales(self, at: At) -> set[float]:
        """Return the factors of the values that one line computes on all ranks and in all micro-batches."""
        known = [self._alignment.find(each) for each in self._alignment.siblings(at)]
        return {float(f"{each.scale:.6g}") for each in known if each is not None}

    def _list_backward(self, first: At, uneven: Sequence[At]) -> list[At]:
        """Return the operators of the backward pass before an operation, the nearest to the loss first."""
        joint, before = self._joint, self._joint.list_before(uneven or self._joint.reads(first))
        own = self._joint.op(first)
        found = [
            op
            for op in before
            if op[0] == first[0] and (joint.op(op).step, joint.op(op).phase) == (own.step, "backward")
        ]
        return sorted(found, key=joint.place)

    def _has_other_numbers(self, op: At) -> bool:
        """Return whether some rank passes numbers that one device does not pass to an operator of this place.

        False if one device has no such place.
        """
        place = (op[0], self._joint.op(op).results[0])
        theirs = [self._one.program.op_of(each) for each in self._alignment.list_counterparts(place)]
        mine = [self._joint.op(self._joint.maker(each)) for each in self._alignment.siblings(place)]
        right = [list_numbers(each.args) for each in theirs]
        return bool(right) and not all(list_numbers(each.args) in right for each in mine)
