"""Counterparts: the single-device operators that correspond to an operator of a rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeverify.explain.align import Alignment
from moeverify.explain.content import Elements
from moeverify.explain.cuts import list_rows
from moeverify.explain.joint import At
from moeverify.explain.known import Key, list_keys
from moeverify.explain.ordering import list_sources_first
from moeverify.explain.program import Op, Program, Ref

_MOST = 4
_MADE_ALIKE = 0.8
"""Overlap of two operands whose operators are counterparts of each other."""

_ALMOST_ALL = 0.99
"""Fraction of elements for which a value `holds` them: some may equal elements of other values."""

_NEAR = 3
"""Maximum number of operators between two values that count as computed from each other."""

_MOST_READERS = 400
"""Maximum number of readers of one value that are considered as counterparts."""

Place = tuple[int | str, ...]
"""Place of an argument: its position or name, then its position in a list."""


@dataclass(frozen=True)
class Pair:
    """Corresponding arguments of two calls: the rank's value and the single device's value."""

    place: Place
    mine: int
    theirs: int


class OneDevice:
    """The single-device program, with an index of the readers of each element."""

    def __init__(self, program: Program, elements: Elements) -> None:
        self.program, self.elements = program, elements
        self.keys = list_keys(program)
        self._readers: dict[int, list[int]] = defaultdict(list)
        self._by_key: dict[Key, list[int]] = defaultdict(list)
        self._by_place: dict[object, list[int]] = defaultdict(list)
        self._sorted: dict[int, tuple[Tensor, Tensor]] = {}
        self._before: dict[int, frozenset[int]] = {}
        self._roots: dict[int, tuple[Tensor, list[int]]] = {}
        self._occurrences: dict[int, int] = {}
        self._labels: dict[int, str] = {}
        for value in program.values:
            if value.label and len(elements.sources[value.number]) == 1:
                self._labels.setdefault(next(iter(elements.sources[value.number])), value.label)
        for op in program.ops:
            for number in set(op.reads()):
                for root in elements.sources[number] | self._list_scaled(number):
                    self._readers[root].append(op.number)
            self._by_place[self.place(op)].append(op.number)
            if op.results:
                members = self._by_key[self.keys[op.results[0]][:-1]]
                self._occurrences[op.number] = len(members)
                members.append(op.number)

    def _list_scaled(self, number: int) -> frozenset[int]:
        """Return the values that a value is a multiple of."""
        op = self.program.ops[self.maker(number)]
        operands = list(op.reads())
        is_scaled = op.short.rstrip("_") in ("mul", "div") and len(operands) == 1
        return self.elements.sources[operands[0]] if is_scaled else frozenset()

    def data(self, number: int) -> Tensor | None:
        """Return the data of a value."""
        return self.program.values[number].data

    def ids(self, number: int) -> Tensor | None:
        """Return the identities of a value's elements."""
        return self.elements.ids[number]

    def has(self, number: int, ids: Tensor) -> float:
        """Return the fraction of these elements that a value contains."""
        own = self.ids(number)
        if not self.elements.sources[number].intersection(self.roots(ids)):
            return 0.0
        flat = ids.reshape(-1)
        flat = flat[flat > 0]
        if own is None or not len(flat) or not own.numel():
            return 0.0
        return float((self.find_places(number, flat) >= 0).double().mean())

    def holds(self, number: int, ids: Tensor) -> bool:
        """Return whether a value contains almost all of these elements."""
        return self.has(number, ids) > _ALMOST_ALL

    def holds_at_place(self, op: Op, ids: Tensor) -> bool:
        """Return whether the calls of an operator's line in its module and step make almost all of these elements."""
        flat = ids.reshape(-1)
        flat = flat[flat > 0]
        is_found = torch.zeros(len(flat), dtype=torch.bool)
        for each in self._list_on_line(self.place(op), op):
            is_found |= self.find_places(each.results[0], flat) >= 0
        return bool(len(flat)) and float(is_found.double().mean()) > _ALMOST_ALL

    def find_places(self, number: int, ids: Tensor) -> Tensor:
        """Return the flat index of each element in a value, or -1 for padding and missing elements.

        Same shape as `ids`.
        """
        if number not in self._sorted:
            own = self.ids(number)
            flat = torch.zeros(0, dtype=torch.int64) if own is None else own.reshape(-1)
            values, order = torch.sort(flat)
            self._sorted[number] = values, order
        values, order = self._sorted[number]
        if not len(values):
            return torch.full_like(ids, -1)
        at = torch.searchsorted(values, ids.contiguous()).clamp(max=len(values) - 1)
        return torch.where((values[at] == ids) & (ids > 0), order[at], -1)

    def list_rows(self, number: int, ids: Tensor | None) -> tuple[int, ...]:
        """Return the first indices in dim 0 of elements that are some whole slices of a value, or empty.

        The value is the last of which `number` is a view or part and that has all elements, or their own.
        """
        if ids is None:
            return ()
        moved, flat, roots = [number], ids[ids > 0], self.roots(ids)
        while moved[-1] not in roots:
            taken = [each for each in self.program.op_of(moved[-1]).reads() if self.roots_of(each)]
            if len(taken) != 1:
                break
            moved += taken
        for each in (*moved, *roots[:1]):
            places = self.find_places(each, flat)
            if bool((places >= 0).all()) and (rows := list_rows(places, self.program.values[each].shape)):
                return rows
        return ()

    def roots(self, ids: Tensor) -> list[int]:
        """Return the values that computed the elements. Results are cached for each `ids` tensor."""
        known = self._roots.get(id(ids))
        if known is None:
            known = self._roots[id(ids)] = (ids, self.elements.roots(ids))
        return known[1]

    def reader(self, number: int) -> Op:
        """Return the first operator that takes a value."""
        return next(op for op in self.program.ops if number in op.reads())

    def roots_of(self, number: int) -> list[int]:
        """Return the values that computed the elements of a value."""
        ids = self.ids(number)
        return [] if ids is None else self.roots(ids)

    def label(self, ids: Tensor) -> str:
        """Return the name of the parameter or buffer that contains all elements, or an empty string."""
        roots = self.roots(ids)
        return self._labels.get(roots[0], "") if len(roots) == 1 else ""

    def resembles(self, mine: Tensor, theirs: Tensor) -> float:
        """Return a similarity of two sets of elements.

        0.5 for versions of one parameter, 0.3 if one is computed from the other, else 0.
        """
        label = self.label(mine)
        if label and label == self.label(theirs):
            return 0.5
        one, two = self.roots(mine)[:1], self.roots(theirs)[:1]
        if one and two and (one[0] in self._list_before(two[0]) or two[0] in self._list_before(one[0])):
            return 0.3
        return 0.0

    def _list_before(self, root: int) -> frozenset[int]:
        """Return the values from which a value is computed in a few steps."""
        if root not in self._before:
            found, front = {root}, {root}
            for _ in range(_NEAR):
                makers = [self.program.op_of(each) for each in front]
                front = {
                    source for op in makers for each in op.reads() for source in self.elements.sources[each]
                }
                found |= front
            self._before[root] = frozenset(found)
        return self._before[root]

    def place(self, op: Op) -> object:
        """Return a key of the source line that calls an operator, shared by all layers that run the line."""
        return key_line(self.program, op)

    def find_on_line(self, program: Program, op: Op, occurrence: int) -> Op | None:
        """Return the call with this number on the same line, module and step, or the last one there.

        `op` is an operator of `program`, the program of a rank.
        """
        found = self._list_on_line(key_line(program, op), op)
        return found[min(occurrence, len(found) - 1)] if found else None

    def _list_on_line(self, line: object, op: Op) -> list[Op]:
        """Return the calls on a line in the step and module of an operator of either side."""
        found = [self.program.ops[number] for number in self._by_place.get(line, ())]
        return [each for each in found if (each.step, each.module) == (op.step, op.module)]

    def maker(self, number: int) -> int:
        """Return the operator that computed a value, looking through views."""
        return self.program.base(number).op

    def occurrence(self, op: Op) -> int:
        """Return how many operators the same place of the program called before this one."""
        return self._occurrences.get(op.number, 0)

    def count(self, op: Op) -> int:
        """Return how many operators this place of the program calls."""
        return len(self._by_key[self.keys[op.results[0]][:-1]]) if op.results else 1

    def candidates(self, key: Key, roots: Iterable[int]) -> list[Op]:
        """Return the operators at the same place of the program, and those that read given elements."""
        found = dict.fromkeys(self._by_key.get(key, ()))
        for root in roots:
            found |= dict.fromkeys(self._readers.get(root, ())[:_MOST_READERS])
        return [self.program.ops[number] for number in found]


def key_line(program: Program, op: Op) -> tuple[object, ...]:
    """Return a key of the source line that calls an operator, on either side."""
    return op.name, op.phase, program.sites_of(op)[:1]


class Counterparts:
    """Search for the single-device operators that correspond to operators of ranks."""

    def __init__(self, alignment: Alignment, one: OneDevice) -> None:
        self._alignment, self._one = alignment, one
        self._found: dict[At, list[Op]] = {}

    def find(self, at: At) -> list[Op]:
        """Return possible counterparts of an operator of a rank, the likeliest first."""
        for each in list_sources_first(at, self._list_unknown, self._found):
            self._found[each] = self._find(each)
        return self._found[at]

    def list_pairs(self, ops: Sequence[At]) -> list[list[tuple[At, Op]]]:
        """Return pairs of all operators with counterparts: the likeliest ones, then those that one operand chooses.

        Where rows are computed with the weights of another expert, rows and weights choose different counterparts.
        """
        found = {at: self.find(at) for at in ops}
        others = found[ops[0]]
        pairs = [
            [(at, each) for at in ops for each in self._list_alike(found[at], other)[:1]] for other in others
        ]
        recorded = self._alignment.joint.op(ops[0])
        is_same = bool(others) and others[0].name == recorded.name
        for pair in pair_tensors(recorded, others[0]) if is_same else ():
            chosen = (
                (at, self._choose_by(at, self._list_alike(found[at], others[0]), pair.place)) for at in ops
            )
            pairs.append([(at, other) for at, other in chosen if other is not None])
        by_numbers = {tuple(other.number for _, other in each): each for each in reversed(pairs)}
        return [each for each in reversed(by_numbers.values()) if len(each) == len(ops)]

    def _list_alike(self, found: Sequence[Op], other: Op) -> list[Op]:
        """Return the counterparts at the same place of the program as `other`."""
        place = self._one.place(other)
        return [each for each in found if self._one.place(each) == place]

    def _choose_by(self, at: At, found: Sequence[Op], place: Place) -> Op | None:
        """Return the counterpart whose operand at a place contains most of the operator's operand there."""
        return max(found, key=lambda other: self._measure(at, other, place), default=None)

    def _measure(self, at: At, other: Op, place: Place) -> float:
        """Return the share of an operand that the same operand of a counterpart contains."""
        pair = find_pair(self._alignment.joint.op(at), other, place)
        known = None if pair is None else self._alignment.find((at[0], pair.mine))
        if pair is None or known is None or known.ids is None:
            return 0.0
        return self._one.has(pair.theirs, known.ids)

    def _list_unknown(self, at: At) -> list[At]:
        """Return the operators that computed the unknown operands of an operator with results."""
        op = self._alignment.joint.op(at)
        taken = [(at[0], number) for number in op.reads()] if op.results else []
        makers = (self._maker(each) for each in taken if self._alignment.find(each) is None)
        return [maker for maker in makers if maker is not None]

    def _find(self, at: At) -> list[Op]:
        alignment, one = self._alignment, self._one
        op = alignment.joint.op(at)
        if not op.results:
            return []
        key = alignment.key((at[0], op.results[0]))[:-1]
        ids: dict[int, Tensor] = {}
        makers: dict[int, int] = {}
        for number in set(op.reads()):
            known = alignment.find((at[0], number))
            if known is not None and known.ids is not None:
                ids[number] = known.ids
            elif known is None:
                maker = self._maker((at[0], number))
                made = self._found[maker] if maker is not None else []
                if made:
                    makers[number] = made[0].number
        roots = [root for each in ids.values() for root in one.roots(each)]
        roots += [root for number in makers.values() for root in one.program.ops[number].results]
        occurrence = alignment.occurrence((at[0], op.results[0]))
        scored = sorted(
            (_score(op, other, key, one, ids, makers, occurrence), other.number)
            for other in one.candidates(key, roots)
        )
        found = [one.program.ops[number] for _, number in scored[:_MOST]]
        # A derivative may compute with the same operands, but its results are no forward results.
        return [other for other in found if op.phase != "forward" or other.phase == "forward"]

    def _maker(self, at: At) -> At | None:
        """Return the operator that computed a floating-point value, looking through views."""
        value = self._alignment.joint.programs[at[0]].base(at[1])
        return (at[0], value.op) if value.is_floating else None


def _score(
    op: Op,
    other: Op,
    key: Key,
    one: OneDevice,
    ids: Mapping[int, Tensor],
    makers: Mapping[int, int],
    occurrence: int,
) -> tuple[float, ...]:
    """Return a sort key: the smaller, the likelier `other` is the counterpart of `op`.

    `ids` maps known operands of `op` to their identities. `makers` maps each unknown operand to the
    counterpart of the operator that computed it.
    """
    is_same = op.short.strip("_") == other.short.strip("_")
    pairs = pair_tensors(op, other) if is_same else list(_pair_by_elements(op, other, one, ids))
    overlap = 0.0
    for pair in pairs:
        mine, theirs = ids.get(pair.mine), one.ids(pair.theirs)
        if mine is not None and theirs is not None:
            share = one.has(pair.theirs, mine)
            overlap += share + (1 - share) * (one.resembles(mine, theirs) if share < 1 else 0.0)
        elif pair.mine in makers:
            overlap += _MADE_ALIKE * (one.maker(pair.theirs) == makers[pair.mine])
    own = one.keys[other.results[0]][:-1] if other.results else ()
    return (
        other.step != op.step,
        not is_same,
        own != key,
        -round(overlap, 2),
        other.module != op.module,
        other.phase != op.phase,
        one.occurrence(other) != occurrence % max(1, one.count(other)),
        abs(len(list(other.reads())) - len(list(op.reads()))),
    )


def _pair_by_elements(op: Op, other: Op, one: OneDevice, ids: Mapping[int, Tensor]) -> Iterator[Pair]:
    for mine in op.reads():
        if mine in ids:
            best = max(other.reads(), key=lambda theirs: one.has(theirs, ids[mine]), default=None)
            if best is not None:
                yield Pair((), mine, best)


def find_pair(op: Op, other: Op, place: Place) -> Pair | None:
    """Return the corresponding tensor arguments at one place of two calls of one operator."""
    return next((each for each in pair_tensors(op, other) if each.place == place), None)


def pair_tensors(op: Op, other: Op) -> list[Pair]:
    """Return the corresponding tensor arguments of two calls of one operator.

    A list operator takes its tensors in the order of the single-tensor operator.
    """
    if op.name != other.name and op.short == other.short:
        mine_all = [each for place, arg in enumerate(op.args) for each in _list_places((place,), arg)]
        theirs_all = [each for place, arg in enumerate(other.args) for each in _list_places((place,), arg)]
        return [
            Pair(place, mine, theirs)
            for (place, mine), (_, theirs) in zip(mine_all, theirs_all, strict=False)
            if place[0] not in op.overwritten
        ]
    pairs: list[Pair] = []
    for place, (mine, theirs) in enumerate(zip(op.args, other.args, strict=False)):
        if place not in op.overwritten:
            pairs += _pair((place,), mine, theirs)
    for name in op.kwargs.keys() & other.kwargs.keys():
        pairs += _pair((name,), op.kwargs[name], other.kwargs[name])
    return pairs


def _list_places(place: Place, argument: object) -> Iterator[tuple[Place, int]]:
    """Yield (place, number) of the values in an argument."""
    if isinstance(argument, Ref):
        yield place, argument.number
    elif isinstance(argument, list | tuple):
        for number, each in enumerate(argument):
            yield from _list_places((*place, number), each)


def _pair(place: Place, mine: object, theirs: object) -> list[Pair]:
    if isinstance(mine, Ref) and isinstance(theirs, Ref):
        return [Pair(place, mine.number, theirs.number)]
    if isinstance(mine, list | tuple) and isinstance(theirs, list | tuple):
        return [
            pair
            for number, (one, two) in enumerate(zip(mine, theirs, strict=False))
            for pair in _pair((*place, number), one, two)
        ]
    return []
