"""Known values of the ranks: those that the single device has, and where it has them.

A value of a rank is known if one of these holds:

- its elements are elements of single-device values (a region, in any order, with padding);
- values of several ranks or micro-batches, including this one, add up to such elements;
- it is a multiple of such elements.

An unknown value is not necessarily wrong: a layout computes values that the single device does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from copy import copy
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from moeverify.explain.compare import is_right, is_rounding
from moeverify.explain.content import (
    Elements,
    by_bytes,
    fingerprint,
    is_move,
    move,
    sample,
    says_something,
)
from moeverify.explain.joint import At, Execution, Joint
from moeverify.explain.meetings import MOVING
from moeverify.explain.operators import NotExecutable, is_blank
from moeverify.explain.ordering import list_sources_first
from moeverify.explain.program import Op, Program

Key = tuple[object, ...]
"""Identifies a place in the program. An operator's calls there share it on all ranks and micro-batches."""


@dataclass(frozen=True)
class Known:
    """A right value. `ids` has the identity of each element (see `Elements`), with the shape of the value.

    `ids` is None for integers, masks and sums that are right as a whole. `over` lists the values, including
    this one, that add up to these elements; it is empty for a value that is right by itself. Elements are
    `scale` times the single-device elements.
    """

    ids: Tensor | None
    scale: float = 1.0
    over: tuple[At, ...] = ()

    @property
    def is_of_mean(self) -> bool:
        """Whether this is a part of a mean. If it is replaced by the total, a sum that follows makes that right."""
        return bool(self.over) and math.isclose(self.scale * len({rank for rank, _ in self.over}), 1.0)


class KnownValues:
    """Known values of all ranks, looked up lazily.

    `scales` are factors under which a multiple of a right value is known, such as the number of ranks that
    share a loss.
    """

    def __init__(self, joint: Joint, one: Program, scales: Sequence[float] = ()) -> None:
        self.joint, self.one = joint, one
        self._execution: Execution | None = None
        self._scales = (1.0, *(each for each in scales if each != 1.0))
        self._wrong_scale: float | None = None
        self._known: dict[At, Known | None] = {}
        self._before: Self | None = None
        self._changed_places: set[int] = set()
        self._telling: dict[At, tuple[Tensor | None, bool]] = {}
        self._blank: dict[At, bool] = {}
        self.elements = Elements(one)
        self._exact = by_bytes((value.number, value.data) for value in one.values)
        self._keys = [list_keys(program) for program in joint.programs]
        self._by_key: dict[Key, list[At]] = {}
        self._by_loose_key: dict[Key, list[At]] = {}
        for rank, keys in enumerate(self._keys):
            for number, key in keys.items():
                self._by_key.setdefault(key, []).append((rank, number))
                self._by_loose_key.setdefault(_loosen(key), []).append((rank, number))
        # Number the places of the program. Here a place is a function; the line within it is ignored.
        self._places = {at: place for place, group in enumerate(self._by_loose_key.values()) for at in group}
        self._one_by_key: dict[Key, set[int]] = {}
        self._one_keys = list_keys(one)
        for number, key in self._one_keys.items():
            self._one_by_key.setdefault(key, set()).add(number)
        self._groups = _list_groups(joint)

    def under(self, execution: Execution) -> Self:
        """Return the known values among those that `execution`, a run with changes, computes."""
        others = execution.changed()
        if not others and self._execution is None:
            return self  # nothing has changed
        changed = copy(self)
        changed._execution, changed._before, changed._known = execution, self, {}
        changed._changed_places = {self._places[at] for at in others}
        return changed

    def without_scale(self, scale: float | None) -> Self:
        """Return known values, of which multiples by `scale` of single-device values count as wrong."""
        changed = copy(self)
        changed._wrong_scale = scale
        if scale is not None:
            # A value may be a multiple of several others, so try this scale first.
            changed._scales = (1.0, scale, *self._scales[1:])
            changed._known = {at: known for at, known in self._known.items() if known and known.scale == 1.0}
            changed._before = None
        return changed

    def data(self, at: At) -> Tensor | None:
        """Return the data of a value."""
        return self.joint.data(at) if self._execution is None else self._execution.data(at)

    def find(self, at: At) -> Known | None:
        """Return the known single-device elements of a value, or None."""
        for each in list_sources_first(at, self._list_moved, self._known):
            inherited = self._inherit(each)
            self._known[each] = inherited[0] if inherited else None  # a sum looks up its parts recursively
            if not inherited:
                self._known[each] = self._look_up(each)
        return self._known[at]

    def _list_moved(self, at: At) -> list[At]:
        """Return the floating-point values whose elements an operator moves to a value; empty for other values."""
        maker = self.joint.maker(at)
        is_open = self.is_moved(at, self.joint.op(maker)) and not self.is_set(at) and not self._inherit(at)
        return [each for each in self.joint.reads(maker) if is_open and self.joint.value(each).is_floating]

    def is_set(self, at: At) -> bool:
        """Return whether a change replaces a value by a single-device value."""
        return self._execution is not None and at in self._execution.changes.values

    def _inherit(self, at: At) -> tuple[Known | None] | None:
        """Return a 1-tuple of the result before the changes if it is still valid, else None."""
        before, execution = self._before, self._execution
        if before is None or execution is None or at in execution.changed():
            return None
        found = (before._known[at],) if at in before._known else before._inherit(at)
        if found is None:
            return None
        known = found[0]
        if known is None:
            # With changed values at this place of the program, the value may now be a part of a sum.
            return None if self._places[at] in self._changed_places else found
        return None if any(each in execution.changed() for each in known.over) else found

    def is_blank(self, at: At) -> bool:
        """Return whether a value is uninitialized memory, or moved from it: earlier tensors left its numbers."""
        for each in list_sources_first(at, lambda value: self._list_copied(value) or (), self._blank):
            sources = self._list_copied(each)
            if sources is None:
                self._blank[each] = is_blank(self.joint.op(self.joint.maker(each)))
            else:
                self._blank[each] = bool(sources) and all(self._blank[source] for source in sources)
        return self._blank[at]

    def _list_copied(self, at: At) -> list[At] | None:
        """Return the values whose elements an operator moves to a value; None for a computed or received one."""
        op = self.joint.op(self.joint.maker(at))
        is_moved = op.meeting is None and self.is_moved(at, op)
        return [(at[0], number) for number in op.reads()] if is_moved else None

    def tells(self, at: At) -> bool:
        """Return whether a value has elements that distinguish it from other values."""
        data = self.data(at)
        known = self._telling.get(at)
        if known is None or known[0] is not data:
            known = self._telling[at] = (data, says_something(data))
        return known[1]

    def key(self, at: At) -> Key:
        """Return the key of the place in the program that computes a value."""
        return self._keys[at[0]][at[1]]

    @property
    def scales(self) -> tuple[float, ...]:
        """The factors under which a multiple of a right value is known."""
        return self._scales

    def list_counterparts(self, at: At) -> list[int]:
        """Return the single-device values of the same place of the program."""
        return sorted(self._one_by_key.get(self.key(at), ()))

    def list_placed(self, number: int, rank: int) -> list[At]:
        """Return the values of a rank at the place of the program that computes a single-device value."""
        return [at for at in self._by_key.get(self._one_keys[number], ()) if at[0] == rank]

    def siblings(self, at: At) -> list[At]:
        """Return the values of all ranks and micro-batches that the same place of the program computes."""
        return self._by_key[self.key(at)]

    def occurrence(self, at: At) -> int:
        """Return how many values the same place of the program has computed before this one, on this rank."""
        return [each for each in self.siblings(at) if each[0] == at[0]].index(at)

    def locate(self, data: Tensor, op: Op, key: Key = ()) -> Known | None:
        """Look up data among the single-device values. `op` and `key` break ties between equal values."""
        likely: AbstractSet[int] = self._one_by_key.get(key, frozenset())

        def prefer(root: int) -> object:
            return root not in likely, _distance(op, self.one.op_of(root))

        first = sample(data)
        for scale in self._scales:
            ids = self.elements.find(data / scale, prefer, first / scale)
            if ids is not None and bool(ids.any()):
                return Known(ids, scale)
        factor = self.elements.find_factor(data, prefer)
        if factor is not None and factor != 0.0 and math.isfinite(factor):
            ids = self.elements.find(data / factor, prefer, first / factor)
            if ids is not None and bool(ids.any()):
                return Known(ids, factor)
        return None

    def _look_up(self, at: At) -> Known | None:
        data = self.data(at)
        if data is None or not data.numel() or (self.is_blank(at) and not self.is_set(at)):
            return None
        op = self.joint.op(self.joint.maker(at))
        if not self.tells(at):
            return self._look_up_exact(at, data, op)
        is_moved = self.is_moved(at, op) and not self.is_set(at)
        known = self._look_up_moved(at, op) if is_moved else None
        known = known or self.locate(data, op, self.key(at))
        return known or self._look_up_sum(at, op)

    def is_moved(self, at: At, op: Op) -> bool:
        kind = op.name.partition(".")[2] if op.meeting is not None else ""
        is_moved = self.joint.value(at).alias >= 0 or is_move(op) or kind in MOVING
        return is_moved and not self._is_rounded(at, op)

    def _is_rounded(self, at: At, op: Op) -> bool:
        """Return whether an operator casts to a narrower dtype: unlike one device, or weights to other numbers.

        Weights are drawn in one dtype and kept in another. Later casts may round the two sides differently.
        """
        made = self.joint.data(at)
        if op.meeting is not None or made is None or not made.is_floating_point():
            return False
        taken = [self.joint.data((at[0], number)) for number in op.reads()]
        floating = [each for each in taken if each is not None and each.is_floating_point()]
        is_narrower = any(each.itemsize > made.itemsize for each in floating)
        is_own = self.key(at) not in self._one_by_key
        return is_narrower and (is_own or (op.step < 0 and is_rounding(made, floating)))

    def _look_up_moved(self, at: At, op: Op) -> Known | None:
        """Apply a data movement to the identities of its operands."""
        scales: set[float] = set()
        overs: set[tuple[At, ...]] = set()
        unknown: list[At] = []

        def ids_of(source: At) -> Tensor | None:
            data = self.data(source)
            if data is None:
                return None
            if not data.is_floating_point():
                return data
            known = self.find(source)
            if known is None or known.ids is None or known.ids.shape != data.shape:
                is_empty = self.is_blank(source) or not self.tells(source)
                unknown.append(source)
                return torch.zeros(data.shape, dtype=torch.float64) if is_empty else None
            scales.add(known.scale)
            overs.add(known.over)
            return known.ids.to(torch.float64)

        ids = self.move(at, ids_of)
        if ids is None or len(scales) != 1 or not overs:
            return None
        data = self.data(at)
        # Padding may hold any number, but an unknown operand counts as padding only where it is zero.
        is_other = data is not None and bool(unknown) and bool(((ids == 0) & (data != 0)).any())
        if data is None or ids.shape != data.shape or is_other:
            return None
        known = Known(ids, scales.pop())
        return replace(known, over=overs.pop()) if len(overs) == 1 else self._join_sums(at, known, overs)

    def move(self, at: At, ids_of: Callable[[At], Tensor | None]) -> Tensor | None:
        """Return the identities in a value that an operator moves, given those of its operands; None if unknown.

        `ids_of` returns data for integers and masks.
        """
        op = self.joint.op(self.joint.maker(at))
        if not self.is_moved(at, op):
            return None
        is_met = op.meeting is not None
        made = self._meet(at, ids_of) if is_met else move(op, lambda number: ids_of((at[0], number)))
        place = op.results.index(at[1])
        return made[place] if made is not None and place < len(made) else None

    def _join_sums(self, at: At, known: Known, overs: Iterable[tuple[At, ...]]) -> Known | None:
        """Return the identities of a value that joins parts of several sums over the same ranks."""
        ranks = {tuple(rank for rank, _ in over) for over in overs}
        if len(ranks) != 1 or known.ids is None:
            return None
        right = known.scale * self.elements.pick(known.ids)
        for parts in self._list_sums(at):
            data = [each for each in map(self.data, parts) if each is not None and each.shape == right.shape]
            is_same = {tuple(rank for rank, _ in parts)} == ranks and len(data) == len(parts)
            if is_same and is_right(torch.stack(data).sum(0), right):
                return replace(known, over=parts)
        return None

    def _meet(self, at: At, ids_of: Callable[[At], Tensor | None]) -> list[Tensor] | None:
        changes = {}
        op = self.joint.maker(at)
        for source in self.joint.reads(op):
            ids = ids_of(source)
            if ids is None:
                return None
            changes[source] = ids
        try:
            made = Execution.meet_with(self.joint, op, changes)
        except NotExecutable:
            return None
        return [each.to(torch.int64) for each in made]

    def _look_up_exact(self, at: At, data: Tensor, op: Op) -> Known | None:
        """Look up integers, masks or simple numbers: as a whole, or as a result next to a known one."""
        if fingerprint(data) in self._exact:
            return Known(None)
        for number in op.results:
            if number != at[1] and self.joint.value((at[0], number)).is_floating:
                return None if self.find((at[0], number)) is None else Known(None)
        return None

    def _look_up_sum(self, at: At, op: Op) -> Known | None:
        """Look up the sum of this value and values of other ranks or micro-batches.

        Replicas of a part, such as a gradient that is summed over `tp`, make the sum over more ranks a multiple.
        """
        multiple = None
        for parts in self._list_sums(at):
            data = [self.data(each) for each in parts]
            if len({None if each is None else each.shape for each in data}) == 1 and data[0] is not None:
                total = torch.stack([each for each in data if each is not None]).sum(0)
                known = self.locate(total, op, self.key(at)) or self._match_total(total, self.key(at))
                if known is not None and self._follow_each_other(parts):
                    continue
                if known is not None and all(torch.equal(each, data[0]) for each in data if each is not None):
                    return Known(known.ids, known.scale / len(parts))  # replicas
                is_of_ranks = len({rank for rank, _ in parts}) == len(parts)  # others may fit by chance
                if known is not None and known.scale == 1.0 and (multiple is None or is_of_ranks):
                    return replace(known, over=parts)
                if known is not None and multiple is None:
                    multiple = replace(known, over=parts)
        return multiple

    def list_parts(self, at: At) -> tuple[At, ...]:
        """Return the values that add up to elements of one device with this one; none if it is right by itself.

        A part of a sum may have zeros where only other ranks have terms. Alone, it has right elements and padding.
        """
        known = self.find(at)
        if known is None or known.over or known.ids is None or not bool((known.ids == 0).any()):
            return known.over if known is not None else ()
        total = self._look_up_sum(at, self.joint.op(self.joint.maker(at)))
        if total is None or total.ids is None or total.scale != known.scale:
            return ()
        return total.over if int(total.ids.count_nonzero()) > int(known.ids.count_nonzero()) else ()

    def _follow_each_other(self, parts: Sequence[At]) -> bool:
        """Return whether one of these values is computed from another one of its rank, unlike micro-batches."""
        ends = list(dict(sorted(parts)).items())
        before = self.joint.list_before(ends) if len(ends) < len(parts) else ()
        return any(self.joint.maker(each) in before for each in parts if each not in ends)

    def _match_total(self, total: Tensor, key: Key) -> Known | None:
        """Return a match if a total equals the single device's total over its micro-batches.

        The rows of micro-batches may differ between a rank and the single device.
        """
        values = [self.one.values[number].data for number in self._one_by_key.get(key, ())]
        if len(values) < 2 or any(each is None or each.shape != total.shape for each in values):
            return None
        right = torch.stack([each for each in values if each is not None]).sum(0)
        found = (scale for scale in self._scales if is_right(total, right * scale))
        scale = next(found, None)
        return None if scale is None else Known(None, scale)

    def _list_sums(self, at: At) -> Iterator[tuple[At, ...]]:
        """Yield values, including `at`, that may add up: those of its line, then those of its function."""
        tried = set[tuple[At, ...]]()
        # Ranks may compute their parts in different lines of the same function.
        for members in (self.siblings(at), self._by_loose_key[_loosen(self.key(at))]):
            for parts in self._list_sums_of(at, members):
                if parts not in tried:
                    tried.add(parts)
                    yield parts

    def _list_sums_of(self, at: At, members: Sequence[At]) -> Iterator[tuple[At, ...]]:
        by_rank: dict[int, list[At]] = {}
        for each in members:
            by_rank.setdefault(each[0], []).append(each)
        own = by_rank[at[0]]
        place = own.index(at)
        groups = [group for group in self._groups if at[0] in group]
        even = [group for group in groups if all(len(by_rank.get(rank, ())) == len(own) for rank in group)]
        for group in even:
            yield tuple(by_rank[rank][place] for rank in group)
        # Layers without modules of their own run the same lines: one device tells how many in each pass.
        period = len(self._one_by_key.get(self.key(at), ()))
        if 1 < period < len(own) and len(own) % period == 0:
            passes = {rank: each[place % period :: period] for rank, each in by_rank.items()}
            yield tuple(passes[at[0]])
            for group in even:
                yield tuple(each for rank in group for each in passes[rank])
        if len(own) > 1:
            yield tuple(own)
            for group in groups:
                if all(rank in by_rank for rank in group):
                    yield tuple(each for rank in group for each in by_rank[rank])


def list_keys(program: Program) -> dict[int, Key]:
    """Return the key of each value of a program, by its number.

    The derivative of one operator may call an operator twice, for two operands. Their order distinguishes
    these calls.
    """
    keys: dict[int, Key] = {}
    counts: dict[tuple[int, str], int] = {}
    for op in program.ops:
        place = counts[op.origin, op.name] = counts.get((op.origin, op.name), -1) + 1
        sites = program.sites_of(op)[:2]
        base = (op.step, op.phase, op.module, op.name, sites, place if op.origin >= 0 else 0)
        for slot, number in enumerate(op.results):
            keys[number] = (*base, slot)
    return keys


def _loosen(key: Key) -> Key:
    """Return a key without line numbers, equal for all calls of an operator in one function."""
    step, phase, module, name, sites, place, slot = key
    functions = tuple((site.file, site.function) for site in sites)  # type: ignore[attr-defined]
    return step, phase, module, name, functions, place, slot


def _distance(op: Op, other: Op) -> tuple[bool, ...]:
    """Return a sort key of the differences between two operators, the most important first."""
    return (
        other.step != op.step,
        other.short.rstrip("_") != op.short.rstrip("_"),
        other.module != op.module,
        other.phase != op.phase,
    )


def _list_groups(joint: Joint) -> list[tuple[int, ...]]:
    """Return the rank groups that sums may be over: those of the collectives, then all ranks."""
    groups = {
        op.meeting.group.ranks: None
        for program in joint.programs
        for op in program.ops
        if op.meeting is not None and len(op.meeting.group.ranks) > 1
    }
    if len(joint.programs) > 1:
        groups[tuple(range(len(joint.programs)))] = None
    return list(groups)
