"""Origins of wrong operands: factors, earlier operands and moves, compared with the single device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from moeverify.explain.align import Alignment
from moeverify.explain.chains import is_passing, list_chain, multiplies, skip_moves, walk_back
from moeverify.explain.compare import is_right
from moeverify.explain.counterparts import OneDevice, key_line, pair_tensors
from moeverify.explain.describe import describe_at, describe_op, is_alike, join_last, list_numbers
from moeverify.explain.edit import Edit
from moeverify.explain.indexing import number_sources
from moeverify.explain.joint import At, Changes, Execution, Joint
from moeverify.explain.known import Known
from moeverify.explain.operators import run
from moeverify.explain.program import HIDDEN, Mark, Op
from moeverify.explain.relate import Reference
from moeverify.results.culprit import Operation

_MOST_MOVES = 3
_MOST_FOLLOWED = 64
_MOST_BEFORE_SUM = 32
"""Maximum number of operators between parts of a sum and a factor of them."""
_MOST_TIMES = 4
"""Maximum number of times that a line multiplies a value before it is judged."""
_MOST_OPERANDS = 4
"""Maximum number of operands of an operator that have their factor from one value."""
_FEW = 0.1
"""Maximum fraction of zeros among numbers that an operator sets to zero."""


class Origins:
    """Traces operands of the ranks back to where they were computed.

    `breaks` returns whether an execution makes right results wrong.
    """

    def __init__(self, alignment: Alignment, one: OneDevice, breaks: Callable[[Execution], bool]) -> None:
        self._alignment, self._one, self._joint = alignment, one, alignment.joint
        self._breaks = breaks
        self._scales: dict[At, tuple[float, At]] = {}

    def is_made_of(self, theirs: int, taken: At) -> bool:
        """Return whether a value has, or is computed from, elements that a rank's operand is multiples of."""
        known = self._alignment.find(taken)
        if known is None or known.ids is None:
            return False
        operands = self._one.program.op_of(self._root_of(theirs)).reads()
        return any(self._one.holds(each, known.ids) for each in (theirs, *operands))

    def count_zeros(self, mine: At, theirs: int) -> float:
        """Return the fraction of zeros in a value, minus the fraction in the right value."""
        here, there = self._alignment.data(mine), self._one.data(theirs)
        if here is None or there is None or not here.numel() or not there.numel():
            return 0.0
        return float((here == 0).double().mean()) - float((there == 0).double().mean())

    def trace_zeros(self, taken: At, right: Tensor) -> At | None:
        """Return the operator that set the elements of a value to zero which are not zero in the right value.

        None if no operator takes other numbers at the same places.
        """
        data = self._alignment.data(taken)
        if data is None or data.shape != right.shape:
            return None
        at, lost = self._trace_moved(taken, ((data == 0) & (right != 0)).reshape(-1))
        for _ in range(_MOST_FOLLOWED):
            maker = self._joint.maker(at)
            if not bool(lost.any()) or self._joint.op(maker).meeting is not None:
                return None
            if not self._joint.reads(maker):  # it makes zeros
                return None if self._joint.op(maker).short in HIDDEN else maker
            shares = {}
            for read in self._joint.reads(maker):
                value = self._alignment.data(read)
                if value is not None and value.is_floating_point() and value.numel() == lost.numel():
                    shares[read] = float((value.reshape(-1)[lost] == 0).double().mean())
            if not shares:
                return None
            at = max(shares, key=lambda each: shares[each])
            if shares[at] < 1 - _FEW:  # else it takes these zeros
                return maker if shares[at] < _FEW else None
        return None

    def _trace_moved(self, at: At, places: Tensor) -> tuple[At, Tensor]:
        """Follow elements of a value through moves. Return the value that most of them come from, and their places.

        `places` is a mask of the flat value, bool, and so is the result.
        """
        for _ in range(_MOST_FOLLOWED):
            starts, ids = number_sources(self._alignment, at)
            found = torch.zeros(0) if ids is None else ids.reshape(-1)[places] - 1
            if not len(found) or bool((found < 0).any()):
                return at, places
            sizes = {read: math.prod(self._joint.value(read).shape) for read in starts}
            inside = {
                read: (found >= first) & (found < first + sizes[read]) for read, first in starts.items()
            }
            at = max(inside, key=lambda read: int(inside[read].sum()))
            places = torch.zeros(sizes[at], dtype=torch.bool)
            places[found[inside[at]] - starts[at]] = True
        return at, places

    def trace_scale(self, taken: At, *, of_parts: bool = False) -> tuple[float, At]:
        """Return the factor of a scaled value, and the first operator that introduces it.

        This is the first operator on the path for which dividing its result by its factor repairs the
        value. A program may correct an earlier factor by a later division. A part of a sum counts `of_parts` alone.
        """
        known = self._alignment.find(taken)
        if known is None or known.scale == 1.0 or (known.over and not of_parts):
            return 1.0, self._joint.maker(taken)
        if taken not in self._scales:
            self._scales[taken] = self._trace_scale(taken, known)
        return self._scales[taken]

    def _trace_scale(self, taken: At, known: Known) -> tuple[float, At]:
        path = [(taken, known.scale)]
        self._follow_scaled(path, 1)
        part = self._find_scaled_part(taken, *path[-1])
        if part is not None:
            return part
        self._follow_scaled(path, _MOST_OPERANDS)
        for at, own in reversed(path):
            carried = self._alignment.find(at)
            is_part = bool(known.over) or (carried is not None and bool(carried.over))
            for scale in _list_factors(own, known.scale):
                values = self._alignment.siblings(at) if is_part else [at]  # the parts are scaled together
                data = {
                    each: made / scale for each in values if (made := self._alignment.data(each)) is not None
                }
                if self._is_repaired(taken, Changes(values=data)):
                    return scale, self._joint.maker(at)
        return known.scale, self._joint.maker(taken)

    def _find_scaled_part(self, taken: At, end: At, scale: float) -> tuple[float, At] | None:
        """Return the operator that multiplies the ranks' parts of a sum, unlike one device, and its factor.

        `end` is the first multiple of a single-device value before the value `taken`, such as the sum. The operator
        may run several times before it.
        """

        def reads(op: At) -> list[At]:
            known = [(at, self._alignment.find(at)) for at in self._joint.reads(op)]
            return [at for at, each in known if each is None or each.scale != 1.0]

        for op in walk_back(self._joint, [self._joint.maker(end)], reads, _MOST_BEFORE_SUM):
            if op == self._joint.maker(end) or not multiplies(self._joint, op):
                continue
            factor = self._find_own_factor(op)
            powers = [factor**times for times in range(1, _MOST_TIMES + 1)]
            pairs = itertools.product((scale, 1 / scale), powers)
            is_factor = any(math.isclose(*pair, rel_tol=1e-9) for pair in pairs)
            if is_factor and self._is_repaired(taken, self._divide_line(op, factor)):
                return factor, op
        return None

    def _find_own_factor(self, op: At) -> float:
        """Return the factor of an operator that multiplies or divides by a number, relative to one device."""
        recorded, theirs = self._joint.op(op), self._list_numbers_there(op)
        if len(theirs) > 1 or not all(type(each) in (int, float) and each for each in theirs):
            return 1.0  # such as a tensor, or another number in each layer
        ratio = float(recorded.args[1]) / next(iter(theirs), 1.0)
        return 1 / ratio if ratio and recorded.short.rstrip("_") == "div" else ratio

    def _list_numbers_there(self, op: At) -> set[Any]:
        """Return the second arguments of an operator's counterparts on one device."""
        others = self._alignment.list_counterparts((op[0], self._joint.op(op).results[0]))
        return {number for each in map(self._one.program.op_of, others) for number in each.args[1:2]}

    def rescale(self, op: At, factor: float) -> Edit | None:
        """Return the edit that gives the line of an operator the number of one device; None for another factor."""
        if not multiplies(self._joint, op) or not math.isclose(
            self._find_own_factor(op), factor, rel_tol=1e-9
        ):
            return None
        changes = self._divide_line(op, factor)
        (theirs,) = self._list_numbers_there(op) or (1.0,)
        ops = tuple(sorted(changes.ops, key=lambda each: (each != op, self._joint.place(each))))
        return Edit(
            "number", ops, changes, place=(1,), numbers=((str(self._joint.op(op).args[1]), str(theirs)),)
        )

    def _divide_line(self, op: At, factor: float) -> Changes:
        """Return changes that divide the results of an operator on all ranks, in all layers that run its line."""
        recorded, programs = self._joint.op(op), self._joint.programs
        line = key_line(programs[op[0]], recorded)

        def divide(other: Op, read: Callable[[int], Tensor]) -> list[Tensor]:
            return [each / factor for each in run(other, read)]

        return Changes(
            {
                (rank, each.number): partial(divide, each)
                for rank, program in enumerate(programs)
                for each in program.ops
                if each.results and each.step == recorded.step and key_line(program, each) == line
            }
        )

    def _is_repaired(self, taken: At, changes: Changes) -> bool:
        """Return whether a change of earlier values makes a value right, and no right result wrong."""
        wanted = self._alignment.siblings(taken)  # a part of a sum is right beside the others
        done = self._joint.execute(changes, wanted) if changes.ops or changes.values else None
        found = None
        if done is not None and taken not in done.tainted:
            found = self._alignment.under(done).find(taken)
        is_right_now = found is not None and math.isclose(found.scale, 1.0)
        return is_right_now and not self._breaks(self._joint.execute(changes))

    def _follow_scaled(self, path: list[tuple[At, float]], most: int) -> None:
        """Add the operands from which the last value of a path has its factor, and their factors.

        At most `most` operands of an operator may have one factor, as from one value. The first one is followed.
        """
        while True:
            scaled = self._list_scaled(self._joint.maker(path[-1][0]), path[-1][1])
            is_one = all(math.isclose(scale, scaled[0][1], rel_tol=1e-9) for _, scale in scaled)
            if not (1 <= len(scaled) <= most and is_one):
                return
            path.append(min(scaled, key=lambda each: self._joint.place(self._joint.maker(each[0]))))

    def _list_scaled(self, maker: At, factor: float) -> list[tuple[At, float]]:
        """Return the operands of an operator that are multiples of right values, and their factors.

        `factor` is the factor of the result.
        """
        reads = dict.fromkeys(self._joint.reads(maker))  # x * x takes a value twice
        found = [(at, known.scale) for at in reads if (known := self._alignment.find(at)) is not None]
        scaled = [(at, scale) for at, scale in found if scale != 1.0]
        scaled = scaled or [(at, scale) for at in reads if (scale := self._compare_at_place(at)) != 1.0]
        if not scaled:
            # A multiple may equal another right value: the gradient of x * x computes 2 * x.
            scaled = [
                (at, scale)
                for at in reads
                for scale in _list_factors(factor, factor)
                if self._is_multiple(at, scale)
            ]
        if not scaled and is_passing(self._joint, maker):
            # Elements of a value that is joined from several ones and padded, such as a bucket.
            scaled = [
                (at, factor)
                for at in reads
                if self._alignment.find(at) is None and self._joint.value(at).is_floating
            ]
        return scaled

    def _compare_at_place(self, at: At) -> float:
        """Return the factor of a value, which says too little to be known, to the only one of its place; else 1."""
        others = [self._one.data(each) for each in self._alignment.list_counterparts(at)]
        data = None if self._alignment.tells(at) else self._alignment.data(at)
        right = others[0] if len(others) == 1 else None
        if data is None or right is None or data.shape != right.shape or not data.is_floating_point():
            return 1.0
        largest = int(right.abs().argmax())
        factor = float(data.flatten()[largest] / right.flatten()[largest]) if bool(right.any()) else 0.0
        is_factor = factor != 0.0 and math.isfinite(factor) and is_right(data, right * factor)
        return factor if is_factor else 1.0

    def _is_multiple(self, at: At, scale: float) -> bool:
        """Return whether a forward value is a multiple although its elements match a later pass."""
        known, data = self._alignment.find(at), self._alignment.data(at)
        op = self._joint.op(self._joint.maker(at))
        if known is None or known.ids is None or data is None or op.phase != "forward":
            return False
        roots = self._one.roots(known.ids)
        if not roots or self._one.program.op_of(roots[0]).phase == "forward":
            return False
        found = self._alignment.locate(data / scale, op)
        return found is not None and found.scale == 1.0

    def trace_operand(self, taken: At, theirs: int) -> tuple[At, At, int] | None:
        """Return the operator that computed a value from an operand that differs, and this operand on both sides."""
        maker = self._joint.maker(skip_moves(self._joint, taken))
        known = self._alignment.find(taken)
        is_named = (
            known is not None
            and known.ids is not None
            and known.scale == 1.0
            and self._one.label(known.ids) != ""
        )
        # If the value has elements of the right operand, the operators that moved them are wrong.
        is_mixed = not set(self.roots_of(taken)).isdisjoint(self._one.roots_of(theirs))
        if is_named or is_mixed or self._joint.op(maker).step < 0:
            return None
        other = self._one.program.ops[self._one.maker(self._root_of(theirs))]
        op = self._joint.op(maker)
        if op.short != other.short or op.meeting is not None or not list(op.reads()):
            return None
        others = []
        for pair in pair_tensors(op, other):
            known = self._alignment.find((maker[0], pair.mine))
            if known is None or known.over:
                return None
            if known.ids is not None and not self._one.holds(pair.theirs, known.ids):
                others.append(((maker[0], pair.mine), pair.theirs))
        # Return the earliest one: the others may be computed from it.
        return (maker, *min(others, key=lambda each: self._joint.maker(each[0])[1])) if others else None

    def _root_of(self, number: int) -> int:
        roots = self._one.roots_of(number)
        return roots[0] if roots else number

    def list_moves(self, mine: At, theirs: int) -> dict[str, Any]:
        """Return the moves of an operand since it was computed, where ranks and the single device differ.

        The result has fields of a culprit: `moves`, `moves_there` and `numbers`.
        """
        here = list_chain(self._joint, [mine])
        there = list_chain(self._one_joint, [(0, theirs)])
        while here and there and self._is_alike(here[-1], there[-1]):
            here, there = here[:-1], there[:-1]
        here, there = self._drop_common(here, there)
        numbers = [
            pair
            for one in here
            for two in there
            if self._is_same_line(one, two) and self._measure_block(one, two) != 0.0
            for pair in list_numbers(self._joint.op(one), self._one_joint.op(two))
        ]
        mine_all = join_last(describe_at(self._joint, each) for each in sorted(here, key=self._joint.place))
        others = join_last(
            describe_at(self._one_joint, each) for each in sorted(there, key=self._one_joint.place)
        )
        is_same = self.roots_of(mine) == self._one.roots_of(theirs)
        if is_same and not others and (order := self._list_reorder(mine)):
            return {"moves": order[-_MOST_MOVES:]}
        others_here = [each for each in here if self._is_other_index(each, there)]
        has_more = any(not any(self._is_same_line(one, two) for one in here) for two in there)
        index = None if has_more else min(others_here, key=self._joint.place, default=None)
        if index is not None:  # moves after it differ because of it
            mine_all = (describe_at(self._joint, index),)
            others = join_last(
                describe_at(self._one_joint, each) for each in there if self._is_same_line(index, each)
            )
        kept = slice(_MOST_MOVES) if is_same else slice(-_MOST_MOVES, None)
        found: dict[str, Any] = {"moves": mine_all[kept], "moves_there": others[kept]}
        return found | ({"numbers": tuple(dict.fromkeys(numbers))} if numbers else {})

    def describe_later(self, mine: At, mark: Mark) -> tuple[Operation, ...]:
        """Return the operations that one device applies to a rank's final value to get its own."""
        return join_last(describe_op(self._one.program, each) for each in self.list_later(mine, mark))

    def list_later(self, mine: At, mark: Mark) -> list[Op]:
        """Return the operators that one device applies to a rank's final value to get its own.

        Empty if the rank's value is not on the way to the value that one device shows at `mark`.
        """
        program, shown = self._one.program, self._one.program.marks[mark][-1].value
        roots = set(self.roots_of(mine))
        if shown is None or roots & set(self._one.roots_of(shown)):
            return []
        waiting: list[tuple[int, tuple[int, ...]]] = [(shown, ())]
        seen = {shown}
        while waiting and len(seen) < _MOST_FOLLOWED:
            number, later = waiting.pop(0)
            op = program.op_of(number)
            for read in op.reads():
                if roots & set(self._one.roots_of(read)):
                    return [program.ops[each] for each in (op.number, *later)]
                if read not in seen:
                    seen.add(read)
                    waiting.append((read, (op.number, *later)))
        return []

    def _is_alike(self, mine: At, theirs: At) -> bool:
        """Return whether two operators have the same options and no differing results."""
        op, other = self._joint.op(mine), self._one_joint.op(theirs)
        return is_alike(op, other) and not self._differs(mine, theirs)

    def _differs(self, mine: At, theirs: At) -> bool:
        """Return whether integer or mask results of the same shape differ."""
        for number, other in zip(
            self._joint.op(mine).results, self._one_joint.op(theirs).results, strict=False
        ):
            here, there = self._joint.data((mine[0], number)), self._one.data(other)
            if here is not None and there is not None and not here.is_floating_point():
                return here.shape == there.shape and not torch.equal(here, there)
        return False

    def _measure_block(self, mine: At, theirs: At) -> float | None:
        """Return the error of a rank's integers or masks as a block of the single device's.

        None for other values, and for shapes that are no block's.
        """
        errors = []
        for number, other in zip(
            self._joint.op(mine).results, self._one_joint.op(theirs).results, strict=False
        ):
            here, there = self._joint.data((mine[0], number)), self._one.data(other)
            if here is None or there is None or here.is_floating_point() or there.is_floating_point():
                return None
            relation = Reference(there, 0.0).relate(here)
            if relation is None:
                return None
            errors.append(relation.error)
        return max(errors, default=None)

    def _is_other_index(self, mine: At, there: Sequence[At]) -> bool:
        """Return whether integers or masks have the shape of a block of those at the same line, and differ."""
        errors = [self._measure_block(mine, each) for each in there if self._is_same_line(mine, each)]
        return bool(errors) and all(errors)

    def _drop_common(self, here: Sequence[At], there: Sequence[At]) -> tuple[list[At], list[At]]:
        """Return two chains without common calls: same line, options and, if comparable, results."""
        pairs = {
            one: two
            for one in here
            if not self._is_other_index(one, there)
            for two in there
            if self._is_same_line(one, two)
            and (
                self._measure_block(one, two) == 0.0
                or not (list_numbers(self._joint.op(one), self._one_joint.op(two)) or self._differs(one, two))
            )
        }
        found = [each for each in here if each not in pairs]
        others = [each for each in there if each not in pairs.values()]
        return (found, others) if found or others else (list(here), list(there))

    def _is_same_line(self, mine: At, theirs: At) -> bool:
        sites = self._joint.sites(mine)[:1]
        return sites == self._one.program.sites_of(self._one_joint.op(theirs))[:1]

    def _list_reorder(self, taken: At) -> tuple[Operation, ...]:
        """Return the moves that first reorder the rows of a value, if it already has its shape there.

        A module may compute rows in any order, and return them in the order of its input.
        """
        joint, shape = self._joint, self._joint.value(taken).shape
        first = joint.op(joint.maker(taken))
        if not self._is_reordered(taken):
            return ()
        for op in sorted(joint.list_before([taken]), key=joint.place):
            recorded = joint.op(op)
            if op[0] != taken[0] or (recorded.step, recorded.phase) != (first.step, first.phase):
                continue
            for number in recorded.results:
                at = (op[0], number)
                if joint.value(at).shape == shape and self._is_reordered(at):
                    chain = list_chain(joint, [at]) or [op]
                    return join_last(
                        describe_at(self._joint, each) for each in sorted(chain, key=joint.place)
                    )
        return ()

    def _is_reordered(self, at: At) -> bool:
        """Return whether a value has the elements of one single-device value in another order."""
        known = self._alignment.find(at) if self._joint.value(at).is_floating else None
        if known is None or known.ids is None or known.over or self._one.label(known.ids):
            return False
        if len(self._one.roots(known.ids)) != 1:
            return False
        flat = known.ids.reshape(-1)
        flat = flat[flat > 0]
        return bool((flat.diff() < 0).any())

    def roots_of(self, at: At) -> list[int]:
        """Return the single-device values whose elements a value contains."""
        known = self._alignment.find(at)
        return [] if known is None or known.ids is None else self._one.roots(known.ids)

    @cached_property
    def _one_joint(self) -> Joint:
        return Joint([self._one.program])


def _list_factors(own: float, of_result: float) -> tuple[float, ...]:
    """Return the possible factors of an operand: x * x has the square of the factor of x."""
    return tuple(dict.fromkeys((own, math.sqrt(abs(of_result)))))
