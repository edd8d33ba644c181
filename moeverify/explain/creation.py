"""Creation of wrong elements: traces a wrong operand back to the operators that put these elements into it.

Integers and masks have no identity, but their places do: where a rank's operand should be some elements of a
single-device value, so should the operands of both, through the same elementwise operators. On the rank, views and
moves lead on to the values from which they took the elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moeverify.explain.align import Alignment
from moeverify.explain.content import TOLERANCE, is_move, move
from moeverify.explain.counterparts import OneDevice, Pair, find_pair, pair_tensors
from moeverify.explain.edit import Edit
from moeverify.explain.edits import find_operands
from moeverify.explain.indexing import find_chosen, list_columns, list_indices, list_rows_of, number_sources
from moeverify.explain.joint import At, Changes
from moeverify.explain.operators import NotExecutable, find
from moeverify.explain.program import Op, Ref

_MOST_STEPS = 48
_MOST_MATCHES = 1 << 24
"""Maximum number of comparisons to find an index."""
_AGREED = 0.9
"""Minimum fraction of the uses of elements that agree on which elements are right."""
_DIFFERENT = 0.5
"""Minimum fraction of elements that occur once in a value that tells where its elements belong."""

_ADDING = {"add": 1, "sub": -1}


@dataclass(frozen=True)
class RightElements:
    """The right elements of a value where `told`, both with its shape.

    They are the elements `places` of the flat single-device value `theirs`; it is -1 if there is none.
    """

    right: Tensor
    told: Tensor
    theirs: int = -1
    places: Tensor | None = None


class Creation:
    """Search for the operators that create the wrong elements of an operand."""

    def __init__(self, alignment: Alignment, one: OneDevice) -> None:
        self._alignment, self._one, self._joint = alignment, one, alignment.joint

    def find(self, edit: Edit) -> Edit | None:
        """Return the edit that puts the right elements of an operand where they are created, or None.

        None too if ranks create them in several lines, or if they are floating-point numbers.
        """
        fronts: list[dict[At, RightElements]] = []
        path: list[At] = []
        for op in edit.ops if edit.kind == "operand" else ():
            pair = find_pair(self._joint.op(op), edit.others[op], edit.place)
            taken = (op[0], -1 if pair is None else pair.mine)
            if pair is None or taken not in edit.changes.values:
                return None
            wanted = self._start(op, edit, pair, edit.changes.values[taken])
            front, passed = ({}, []) if wanted is None else self._trace({taken: wanted})
            is_sent = any(self._joint.op(each).meeting is not None for each in passed)
            # Another rank made them: the code that received them may have chosen the wrong ones.
            if is_sent and any(each.theirs < 0 for each in front.values()):
                return None
            path += passed
            fronts.append(front if passed else {})
        values = _merge(fronts)
        # Floating-point elements have an identity: `Origins` traces them.
        is_of_integers = values and not any(self._joint.value(at).is_floating for at in values)
        if not is_of_integers or len({self._line(at) for at in values}) != 1:
            return None
        makers = {self._joint.maker(at): each for at, each in values.items()}
        return Edit(
            "created",
            tuple(makers),
            Changes(values={at: each.right for at, each in values.items()}),
            {op: self._one.program.op_of(each.theirs) for op, each in makers.items() if each.theirs >= 0},
            numbers=self._list_numbers(values),
            path=tuple(path[::-1]),
        )

    def _line(self, at: At) -> object:
        maker = self._joint.maker(at)
        return self._joint.op(maker).name, self._joint.sites(maker)[:1]

    def _list_numbers(self, wanted: Mapping[At, RightElements]) -> tuple[tuple[str, str], ...]:
        """Return the first wrong elements and the right ones."""
        for at, each in wanted.items():
            data = self._alignment.data(at)
            if data is not None and bool((other := _differs(data, each) & each.told).any()):
                return ((name_elements(data[other]), name_elements(each.right[other])),)
        return ()

    def _start(self, op: At, edit: Edit, pair: Pair, right: Tensor) -> RightElements | None:
        """Return the right elements of an operand with their places in that of one device, or None."""
        whole = self._one.data(pair.theirs)
        if whole is None:
            return None
        index = torch.arange(whole.numel()).reshape(whole.shape)
        for found in find_operands(self._alignment, self._one, op, edit.others[op], pair, index):
            places = found.long()
            if torch.equal(whole.reshape(-1)[places.clamp(min=0)], right):
                return RightElements(right, torch.ones(right.shape, dtype=torch.bool), pair.theirs, places)
        return None

    def _trace(self, front: dict[At, RightElements]) -> tuple[dict[At, RightElements], list[At]]:
        """Return the earliest wrong values behind those of `front`, and the operators that pass them on."""
        passed, closed = list[At](), set[At]()
        for _ in range(_MOST_STEPS):
            left = [at for at in front if at not in closed]
            if not left:
                break
            last = max(left, key=lambda at: self._joint.place(self._joint.maker(at)))
            before = self._step(last, front[last])
            merged = _merge([{at: each for at, each in front.items() if at != last}, before])
            if before and merged:
                front = merged
                passed.append(self._joint.maker(last))
            else:
                closed.add(last)
        return front, passed

    def _step(self, at: At, wanted: RightElements) -> dict[At, RightElements]:
        """Return the wrong values from which an operator takes the wrong elements of its result."""
        op = self._joint.op(self._joint.maker(at))
        found = {}
        if _casts(op):
            found = self._cast((at[0], next(op.reads())), wanted)
        elif op.meeting is None:
            found = self._split(at, op, wanted)
            if found and self._subtract(at, op, wanted):
                return {}  # either operand may be wrong
        if not found and self._alignment.is_moved(at, op):
            found = self._choose(at, op, wanted)
            if not found and not self._comes_from_right(at, wanted):
                found = self._route(at, wanted)
        elif not found:
            found = self._subtract(at, op, wanted)
        return {each: made for each, made in found.items() if self._is_wrong(each, made)}

    def _comes_from_right(self, at: At, wanted: RightElements) -> bool:
        """Return whether moves alone lead from a right value to a wrong one, so that these moves are wrong."""
        op = self._joint.op(self._joint.maker(at))
        if not self._alignment.is_moved(at, op) or self._choose(at, op, wanted):
            return False
        found = self._route(at, wanted)
        wrong = {each: made for each, made in found.items() if self._is_wrong(each, made)}
        return any(self._is_right(each) or self._comes_from_right(each, made) for each, made in wrong.items())

    def _is_right(self, at: At) -> bool:
        """Return whether a value is an input of the run, or the value that its line computes on one device."""
        data = self._alignment.data(at)
        theirs = map(self._one.data, self._alignment.list_counterparts(at))
        return bool(self._joint.value(at).label) or (
            data is not None and any(_is_same(each, data) for each in theirs)
        )

    def _is_wrong(self, at: At, wanted: RightElements) -> bool:
        data = self._alignment.data(at)
        return data is not None and bool((_differs(data, wanted) & wanted.told).any())

    def _cast(self, source: At, wanted: RightElements) -> dict[At, RightElements]:
        """Return the right elements of an operand that is cast to another dtype. The cast on one device is kept."""
        data = self._alignment.data(source)
        if data is None:
            return {}
        theirs, places = wanted.theirs, wanted.places
        while theirs >= 0 and _casts(other := self._one.program.op_of(theirs)):
            theirs = next(other.reads())
        return {source: RightElements(wanted.right.to(data.dtype), wanted.told, theirs, places)}

    def _route(self, at: At, wanted: RightElements) -> dict[At, RightElements]:
        """Return the right elements of the values whose elements an operator moves; empty if they contradict."""
        starts, ids = number_sources(self._alignment, at)
        if ids is None or ids.shape != wanted.right.shape:
            return {}
        found = {}
        for source, first in starts.items():
            data = self._alignment.data(source)
            if data is None:
                continue
            inside = wanted.told & (ids > first) & (ids <= first + data.numel())
            made = _scatter(wanted, inside, ids[inside] - first - 1, data)
            if made is None:
                return {}
            found[source] = made
        return found

    def _split(self, at: At, op: Op, wanted: RightElements) -> dict[At, RightElements]:
        """Return the right operands of an elementwise operator: those of the same one on one device."""
        name, program = op.short.rstrip("_"), self._one.program
        theirs, places = self._follow(wanted, lambda number: program.op_of(number).short.rstrip("_") == name)
        if theirs < 0 or places is None:
            return {}
        other = program.op_of(theirs)
        if not _is_elementwise(op):
            return self._take_whole(at, op, other, replace(wanted, theirs=theirs, places=places))
        found = self._pass_back(at, op, other, replace(wanted, theirs=theirs, places=places))
        wrong = [each for each, made in found.items() if self._is_wrong(each, made)]
        anchors = (self._anchor(each, found[each].theirs, wanted) for each in wrong)
        anchor = next((each for each in anchors if each is not None), None)
        return found if anchor is None else self._pass_back(at, op, other, anchor)

    def _subtract(self, at: At, op: Op, wanted: RightElements) -> dict[At, RightElements]:
        """Return the right integers that an addition of ranks alone adds to all elements of a row or column.

        They are the difference of the right sum and the other operand, if it is the same for all of these elements.
        """
        numbers = [each.number for each in op.args[:2] if isinstance(each, Ref)]
        data = [self._alignment.data((at[0], number)) for number in numbers]
        if op.short.rstrip("_") not in _ADDING or len(data) != 2 or not all(map(_is_integer, data)):
            return {}
        pairs = [(number, each) for number, each in zip(numbers, data, strict=True) if each is not None]
        (small, mine), (_, other) = sorted(pairs, key=lambda pair: pair[1].numel())
        if mine.numel() >= wanted.right.numel():
            return {}
        is_first, sign = small == numbers[0], _ADDING[op.short.rstrip("_")]
        right = wanted.right - sign * other if is_first else sign * (wanted.right - other)
        own = torch.arange(mine.numel()).reshape(mine.shape).expand(wanted.right.shape)
        made = _scatter(RightElements(right, wanted.told), wanted.told, own[wanted.told], mine)
        return {} if made is None else {(at[0], small): made}

    def _pass_back(self, at: At, op: Op, other: Op, wanted: RightElements) -> dict[At, RightElements]:
        """Return the right operands of an elementwise operator, as those of its counterpart at the same places."""
        assert wanted.places is not None
        shape = self._one.program.values[other.results[0]].shape
        found: dict[At, RightElements] = {}
        for pair in pair_tensors(op, other):
            mine, right = self._alignment.data((at[0], pair.mine)), self._one.data(pair.theirs)
            if mine is None or right is None or not _is_broadcast(mine.shape, wanted.right.shape):
                return {}
            numbers = torch.arange(right.numel()).reshape(right.shape).expand(shape)
            index = numbers.reshape(-1)[wanted.places.clamp(min=0)]
            moved = RightElements(
                right.reshape(-1)[index], wanted.told & (wanted.places >= 0), pair.theirs, index
            )
            own = torch.arange(mine.numel()).reshape(mine.shape).expand(wanted.right.shape)
            made = _scatter(moved, moved.told, own[moved.told], mine)
            if made is None:
                return {}
            found[at[0], pair.mine] = made
        return found

    def _anchor(self, at: At, theirs: int, wanted: RightElements) -> RightElements | None:
        """Return the places that an operand gives, whose elements are right, all different and in another order."""
        known, data = self._alignment.find(at), self._alignment.data(at)
        if known is None or known.ids is None or known.over or known.scale != 1.0 or data is None:
            return None
        right = self._one.data(theirs)
        places = self._one.find_places(theirs, known.ids)
        if data.shape != wanted.right.shape or right is None or bool((places < 0).any()):
            return None
        told = _is_single(data) & _is_single(right).reshape(-1)[places]
        has_order = float(told.double().mean()) >= _DIFFERENT
        return replace(wanted, told=told, theirs=theirs, places=places) if has_order else None

    def _take_whole(self, at: At, op: Op, other: Op, wanted: RightElements) -> dict[At, RightElements]:
        """Return the right operands of an operator whose whole result should be that of its counterpart."""
        assert wanted.places is not None
        own = torch.arange(wanted.right.numel()).reshape(wanted.right.shape)
        is_whole = wanted.right.shape == self._one.program.values[wanted.theirs].shape
        if not is_whole or not bool(((own == wanted.places) | ~wanted.told).all()):
            return {}
        found: dict[At, RightElements] = {}
        for pair in pair_tensors(op, other):
            mine, right = self._alignment.data((at[0], pair.mine)), self._one.data(pair.theirs)
            if mine is None or right is None or mine.shape != right.shape:
                return {}
            places = torch.arange(right.numel()).reshape(right.shape)
            found[at[0], pair.mine] = RightElements(right, places >= 0, pair.theirs, places)
        return found

    def _follow(self, wanted: RightElements, is_end: Callable[[int], bool]) -> tuple[int, Tensor | None]:
        """Follow right elements back through moves on one device to the value for which `is_end` is true.

        Return it with the places of the elements in it, or -1 and None.
        """
        theirs, places = wanted.theirs, wanted.places
        while theirs >= 0 and places is not None:
            if is_end(theirs):
                return theirs, places
            op = self._one.program.op_of(theirs)
            found = (self._trace_move(op, theirs, source, places, wanted.told) for source in op.reads())
            theirs, places = next((each for each in found if each is not None), (-1, None))
        return -1, None

    def _trace_move(
        self, op: Op, number: int, source: int, places: Tensor, told: Tensor
    ) -> tuple[int, Tensor] | None:
        """Return an operand with the places of elements that a move on one device takes from it, or None."""
        chosen = list_indices(op)
        if source in chosen:
            return None

        def identify(each: int) -> Tensor | None:
            data = self._one.data(each)
            if data is None or each in chosen:
                return data
            first = 1 if each == source else -data.numel()
            return torch.arange(first, first + data.numel(), dtype=torch.float64).reshape(data.shape)

        is_moved = _casts(op) or is_move(op) or self._one.program.values[number].alias >= 0
        made = move(_keep_dtype(op), identify) if is_moved else None
        slot = op.results.index(number)
        if made is None or slot >= len(made):
            return None
        ids = made[slot].reshape(-1)[places.clamp(min=0)]
        return (source, ids - 1) if bool((ids[told & (places >= 0)] > 0).all()) else None

    def _choose(self, at: At, op: Op, wanted: RightElements) -> dict[At, RightElements]:
        """Return the right index of an operator that takes elements of a right value; empty if it takes others."""
        taken = find_chosen(op)
        if taken is None:
            return {}
        source, index_of, dim = taken
        data, chosen = self._alignment.data((at[0], source)), self._alignment.data((at[0], index_of))
        if data is None or chosen is None or not self._alignment.is_right((at[0], source)):
            return {}
        dim %= max(1, data.ndim)
        columns = list_columns(op, data, chosen, dim, wanted.right.shape)
        if columns is None or columns.shape[1] * wanted.right.numel() > _MOST_MATCHES:
            return {}
        right, told = wanted.right.reshape(-1)[columns], wanted.told.reshape(-1)[columns]
        rows = list_rows_of(op, data, dim, chosen)
        match = ((right[:, None] == rows) | ~told[:, None]).all(-1)
        is_told = told.any(-1)
        if not bool((match.any(-1) | ~is_told).all()):
            return {}
        index = chosen.reshape(-1).long() % max(1, match.shape[-1])
        keeps = match.gather(-1, index[:, None])[:, 0] | ~is_told
        found = torch.where(keeps, index, match.long().argmax(-1))
        is_sure = is_told & (match.sum(-1) == 1)
        _, places = self._follow(wanted, lambda number: _is_same(self._one.data(number), data))
        if places is not None:
            first = columns.gather(-1, told.long().argmax(-1)[:, None])[:, 0]
            place = (
                places.reshape(-1)[first].clamp(min=0) // math.prod(data.shape[dim + 1 :]) % data.shape[dim]
            )
            if bool((match.gather(-1, place[:, None])[:, 0] | ~is_told).all()):
                found, is_sure = torch.where(is_told, place, index), is_told
        shape = chosen.shape
        return {
            (at[0], index_of): RightElements(found.to(chosen.dtype).reshape(shape), is_sure.reshape(shape))
        }


def _keep_dtype(op: Op) -> Op:
    """Return a cast as a copy, which passes on the identities of elements."""
    return replace(op, name="aten.clone.default", args=op.args[:1], kwargs={}) if _casts(op) else op


def _is_same(one: Tensor | None, data: Tensor) -> bool:
    return one is not None and one.shape == data.shape and not bool((one != data).any())


def _casts(op: Op) -> bool:
    return op.short in ("_to_copy", "to") and len(list(op.reads())) == 1


def _is_elementwise(op: Op) -> bool:
    if op.meeting is not None or not op.name.startswith("aten."):
        return False
    try:
        return torch.Tag.pointwise in find(op.name).tags
    except NotExecutable:
        return False


def _is_broadcast(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Return whether a tensor of `shape` expands to `whole`."""
    dims = zip(reversed(shape), reversed(whole), strict=False)
    return len(shape) <= len(whole) and all(own in (1, size) for own, size in dims)


def _scatter(wanted: RightElements, chosen: Tensor, index: Tensor, data: Tensor) -> RightElements | None:
    """Return the right elements of a value that passes its elements `index` on to the `chosen` ones of `wanted`.

    None if many elements would have to be two different ones. A few may be taken for equal ones at other places.
    """
    right, told = data.clone().reshape(-1), torch.zeros(data.numel(), dtype=torch.bool)
    numbers, code = torch.unique(wanted.right[chosen].to(right.dtype), return_inverse=True)
    pairs, counts = torch.unique(index * len(numbers) + code, return_counts=True)
    place = pairs // max(1, len(numbers))
    most = torch.zeros(data.numel(), dtype=counts.dtype).scatter_reduce(0, place, counts, "amax")
    common = counts == most[place]
    right[place[common]] = numbers[pairs[common] % max(1, len(numbers))]
    told[index] = True
    agrees = right[index] == numbers[code]
    if len(index) and float(agrees.double().mean()) < _AGREED:
        return None
    places = None
    if wanted.places is not None:
        places = torch.full((data.numel(),), -1)
        places[index[agrees]] = wanted.places[chosen][agrees]
        places = places.reshape(data.shape)
    return RightElements(right.reshape(data.shape), told.reshape(data.shape), wanted.theirs, places)


def _merge(fronts: Sequence[Mapping[At, RightElements]]) -> dict[At, RightElements]:
    """Return the right elements of all values of several sets; empty if they contradict."""
    found: dict[At, RightElements] = {}
    for front in fronts:
        for at, each in front.items():
            known = found.get(at)
            if known is None:
                found[at] = each
                continue
            if bool(((known.right != each.right) & known.told & each.told).any()):
                return {}
            main, other = (known, each) if known.theirs >= 0 else (each, known)
            right = torch.where(main.told, main.right, other.right)
            places = None if main.places is None else torch.where(main.told, main.places, -1)
            found[at] = replace(main, right=right, told=main.told | other.told, places=places)
    return found


def _is_integer(data: Tensor | None) -> bool:
    return data is not None and not data.is_floating_point() and data.dtype != torch.bool


def _is_single(data: Tensor) -> Tensor:
    """Return a mask of the elements that occur once."""
    _, group, counts = torch.unique(data, return_inverse=True, return_counts=True)
    single: Tensor = counts[group] == 1
    return single


def _differs(data: Tensor, wanted: RightElements) -> Tensor:
    """Return a mask of the elements that differ, up to rounding."""
    if not data.is_floating_point():
        return data != wanted.right
    return ~torch.isclose(data, wanted.right.to(data.dtype), rtol=TOLERANCE, atol=0.0, equal_nan=True)


def name_elements(data: Tensor) -> str:
    """Return the first elements of a tensor as text."""
    shown = [f"{each:g}" if isinstance(each, float) else str(each) for each in data.reshape(-1)[:3].tolist()]
    return ", ".join(shown) + (" and more" if data.numel() > len(shown) else "")
