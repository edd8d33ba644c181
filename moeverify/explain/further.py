"""Edits whose own results cannot be compared with one device: before the search, and further away from suspects."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from moeverify.explain.align import Alignment
from moeverify.explain.blocks import list_blocks
from moeverify.explain.chains import list_chain, list_group, skip_moves
from moeverify.explain.counterparts import Counterparts, OneDevice
from moeverify.explain.edit import Edit
from moeverify.explain.edits import (
    list_chain_numbers,
    list_edits,
    list_numbers,
    list_removals,
    list_skipped_writes,
)
from moeverify.explain.insertions import list_insertions
from moeverify.explain.integers import list_integers
from moeverify.explain.inverses import list_inverses
from moeverify.explain.joint import At, Execution, Joint
from moeverify.explain.missing_sums import list_unreduced_terms
from moeverify.explain.owned import list_owned
from moeverify.explain.peers import list_peers
from moeverify.explain.program import list_numbers as list_numbers_of
from moeverify.explain.regroup import Groups, list_reductions

_MOST_MADE = 3
"""Most suspects whose operands are suspected too."""

_MADE_BEFORE = 3
"""Most operators from such an operand to a suspect."""
_MOST_NUMBERS = 12
_MOST_SKIPPED = 8
_MOST_BEFORE = 200
_MOST_OTHERS = 16
_LARGEST = 1e6


class Further:
    """Lists edits of operators that suspects depend on. `step` is the explained one.

    `groups` are the rank groups of each mesh axis.
    """

    def __init__(self, joint: Joint, one: OneDevice, step: int, groups: Groups) -> None:
        self._joint, self._one, self._step, self._groups = joint, one, step, groups

    def list_first(self, alignment: Alignment, unknown: Sequence[At], state: Execution) -> Iterator[Edit]:
        """Yield edits that are few, and whose causes no edit of a suspect names.

        These are other blocks of parameters, other integers, other senders in a ring, and skipped writes.
        """
        yield from list_blocks(self._joint, self._one.program, self._groups, of_axes=False)
        yield from list_integers(alignment, self._one, unknown)
        yield from list_peers(self._joint, self._groups, unknown, state)
        yield from itertools.islice(list_skipped_writes(alignment, unknown), _MOST_SKIPPED)

    def list_moved(self, alignment: Alignment, ops: Sequence[At]) -> Iterator[Edit]:
        """Yield edits of the masks and moves before suspects: elements that other ranks own, and other numbers."""
        yield from list_owned(alignment, self._one, ops)
        for op in list_chain(self._joint, self._joint.own_reads(ops[0])):
            yield from list_chain_numbers(alignment, self._one, op)
            yield from list_inverses(alignment, op)

    def list_edits(
        self,
        alignment: Alignment,
        counterparts: Counterparts,
        unknown: Sequence[At],
        suspects: Sequence[tuple[At, ...]],
    ) -> Iterator[Edit]:
        """Yield edits whose own results cannot be compared with the single device; later results decide."""
        for edit in list_blocks(self._joint, self._one.program, self._groups, of_axes=True):
            if self._reaches(edit, suspects):
                yield edit
        yield from list_unreduced_terms(alignment, self._one, self._groups, unknown)
        for ops in suspects:
            yield from list_reductions(alignment, self._groups, ops)
        for ops in suspects:
            yield from list_removals(alignment, ops)
        for group in self._list_makers(alignment, suspects):
            yield from list_edits(alignment, self._one, counterparts, group)
        later: list[Edit] = []
        known = {at for ops in suspects for at in ops}
        for group in _group(alignment, [at for at in unknown if at not in known]):
            for edit in list_edits(alignment, self._one, counterparts, group):
                if edit.kind in ("operand", "share", "total"):
                    yield edit
                elif edit.kind == "number":
                    later.append(edit)
        for ops in suspects:
            for each in list_chain(self._joint, [at for op in ops[:1] for at in self._joint.reads(op)]):
                group = list_group(alignment, each)
                yield from list_removals(alignment, group, depth=3)
                yield from list_numbers(alignment, group, self._list_numbers(each))
        yield from later
        for group in _group(alignment, unknown):
            others = self._list_others(alignment, group[0])
            yield from list_insertions(alignment, group, others)

    def _reaches(self, edit: Edit, suspects: Sequence[tuple[At, ...]]) -> bool:
        """Return whether an edit changes results of the first suspects."""
        results = [at for ops in suspects[:1] for op in ops for at in self._joint.results(op)]
        return not self._joint.execute(edit.changes, results).changed().keys().isdisjoint(results)

    def _list_makers(
        self, alignment: Alignment, suspects: Sequence[tuple[At, ...]]
    ) -> Iterator[tuple[At, ...]]:
        """Yield operators whose known results suspects take: x + x is a multiple of x, but may be wrong for x * y."""
        front = [ops[0] for ops in suspects[:_MOST_MADE]]
        seen = set(front)
        for _ in range(_MADE_BEFORE):
            reads = [at for op in front for at in self._joint.reads(op) if self._joint.value(at).is_floating]
            makers = dict.fromkeys(self._joint.maker(skip_moves(self._joint, at)) for at in reads)
            front = [op for op in makers if op not in seen and self._is_computed(op)]
            seen.update(front)
            yield from (list_group(alignment, op) for op in front)

    def _is_computed(self, op: At) -> bool:
        recorded = self._joint.op(op)
        return recorded.step == self._step and recorded.meeting is None and bool(list(recorded.reads()))

    def _list_others(self, alignment: Alignment, op: At) -> list[At]:
        """Return known values that the module of an operator computed before it."""
        program, rank = self._joint.programs[op[0]], op[0]
        recorded = self._joint.op(op)
        found: dict[At, None] = {}
        for other in program.ops[max(0, op[1] - _MOST_BEFORE) : op[1]]:
            if other.module.startswith(recorded.module) and other.step == recorded.step:
                for number in other.results:
                    at = (rank, number)
                    if (
                        alignment.tells(at)
                        and alignment.find(at) is not None
                        and not self._joint.value(at).label
                    ):
                        found[at] = None
        return list(found)[-_MOST_OTHERS:]

    def _list_numbers(self, op: At) -> list[float]:
        """Return the numbers in the operators of the function that calls an operator."""
        program, sites = self._joint.programs[op[0]], self._joint.op(op).sites
        found: dict[float, None] = {}
        for other in program.ops:
            if (
                other.sites
                and sites
                and (other.sites[0].file, other.sites[0].function) == (sites[0].file, sites[0].function)
            ):
                found |= dict.fromkeys(each for each in list_numbers_of(other.args) if abs(each) < _LARGEST)
        return list(found)[:_MOST_NUMBERS]


def _group(alignment: Alignment, ops: Sequence[At]) -> Iterator[tuple[At, ...]]:
    """Yield operators grouped by their place in the program, in program order."""
    inside = set(ops)
    seen: set[At] = set()
    for at in ops:
        if at not in seen and alignment.joint.op(at).results:
            group = list_group(alignment, at, inside)
            seen.update(group)
            yield group
