"""Module ends as landmarks: results that should equal the single device's, and the first that do not."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from moeverify.explain.align import Alignment
from moeverify.explain.content import TOLERANCE
from moeverify.explain.counterparts import OneDevice
from moeverify.explain.joint import At, Joint
from moeverify.explain.program import Program
from moeverify.explain.relate import Reference

EndName = tuple[str, bool, int]
"""(module, whether it is a gradient, index among several tensors)."""

_MOST_FOLLOWED = 60
"""Maximum number of operators followed from a seemingly wrong end to values that are right again."""


class Landmarks:
    """Module ends in a step, on all ranks and on the single device."""

    def __init__(self, programs: Sequence[Program], one: OneDevice, step: int) -> None:
        self._one = one
        self._right: dict[EndName, set[int]] = {}
        for value, name in _list_ends(one.program, step):
            self._right.setdefault(name, set()).add(value)
        self.by_rank = [self._name_ends(_list_ends(program, step)) for program in programs]

    def _name_ends(self, ends: Sequence[tuple[int, EndName]]) -> dict[int, EndName]:
        """Return the name of each end: the innermost module that the single device also has."""
        found: dict[int, EndName] = {}
        for value, name in sorted(ends, key=lambda end: end[1] not in self._right):
            found.setdefault(value, name)
        return dict(sorted(found.items()))

    def is_end(self, at: At) -> bool:
        """Return whether a value is at the end of a module."""
        return at[1] in self.by_rank[at[0]]

    def list_ends(self, joint: Joint, op: At) -> list[At]:
        """Return the results of an operator that are at the end of a module."""
        results = ((op[0], number) for number in joint.op(op).results)
        return [at for at in results if self.is_end(at)]

    def list_right(self, at: At) -> list[int]:
        """Return the single-device values at the same module end, in program order."""
        return sorted(self._right.get(self.by_rank[at[0]][at[1]], ()))

    def is_right(self, at: At, alignment: Alignment) -> bool:
        """Return whether a module end contains elements of the same end on the single device."""
        known = alignment.find(at)
        if known is None or known.ids is None:
            return False
        ends = self.list_right(at)
        if any(self._one.holds(value, known.ids) for value in ends):
            return True
        # Equal elements may belong to several values, such as rows of one table.
        mine = alignment.data(at)
        return mine is not None and not known.over and any(self._has_part(value, mine) for value in ends)

    def _has_part(self, value: int, mine: Tensor) -> bool:
        """Return whether a tensor is a part of a single-device value, or has rows of it."""
        data = self._one.data(value)
        relation = None if data is None else Reference(data, TOLERANCE).relate(mine)
        return relation is not None and relation.error <= TOLERANCE and relation.factor == 1.0

    def find_first_wrong(self, alignment: Alignment, targets: Sequence[At]) -> list[At]:
        """Return the first wrong ends that the targets depend on, at most one per rank."""
        joint = alignment.joint
        before = joint.list_before(targets)
        found = []
        for rank in sorted({at[0] for at in targets}):
            ends = [(rank, number) for number, name in self.by_rank[rank].items() if name in self._right]
            ends = [at for at in ends if joint.maker(at) in before and alignment.tells(at)]
            for at in ends:
                if self.is_right(at, alignment) or alignment.is_part_of_wrong(at):
                    continue
                if not self.is_recovered(at, alignment, targets):
                    found.append(at)
                    break
        return found

    def is_recovered(self, at: At, alignment: Alignment, targets: Collection[At]) -> bool:
        """Return whether all values computed from a seemingly wrong value are soon right again.

        For a forward value, the forward pass decides: its derivatives may be wrong for another reason.
        """
        joint = alignment.joint
        is_known = not alignment.is_wrong(at)  # a right value of another place; its views are no better
        waiting = self._list_users(joint, at)
        if not waiting:
            return False
        seen: set[At] = set()
        while waiting:
            op = waiting.pop()
            if op in seen:
                continue
            seen.update(joint.members(op))
            if len(seen) > _MOST_FOLLOWED:
                return False
            for each in joint.members(op):
                for result in joint.op(each).results:
                    value = (each[0], result)
                    if value in targets:
                        return False
                    if alignment.is_wrong(value) or (is_known and joint.value(value).alias >= 0):
                        if self.is_end(value):
                            return False
                        waiting += self._list_users(joint, value)
        return True

    def _list_users(self, joint: Joint, at: At) -> list[At]:
        """Return the operators that take a value, for a forward value without derivatives."""
        users = joint.users.get(at, ())
        if joint.op(joint.maker(at)).phase != "forward":
            return list(users)
        return [each for each in users if joint.op(each).phase != "backward"]


def _list_ends(program: Program, step: int) -> list[tuple[int, EndName]]:
    """Return the values at module ends in a step, inner modules first."""
    ends = [end for end in program.ends if end.step == step]
    return [(end.value, (end.module, end.is_gradient, end.slot)) for end in ends]
