"""Gradients of replicas as sums of the ranks' own parts, whatever groups the layout reduces them over.

Each rank that holds an element of a parameter computes a part of its gradient in the backward pass. If the
parts of all ranks add up to the gradient of one device, the backward pass is right, and a wrong gradient is
a wrong sum of these parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from moeverify.explain.cause import Cause
from moeverify.explain.chains import skip_moves
from moeverify.explain.compare import is_right
from moeverify.explain.joint import At, Changes, Joint
from moeverify.explain.program import READ, Program
from moeverify.explain.suspects import Target
from moeverify.parallel.regions.region import Region
from moeverify.results.checks import Kind
from moeverify.results.culprit import SumPart

_MOST_COLUMNS = 32
_LARGEST = 64
"""Maximum numerator and denominator of the weight of a part."""

_SAME = 1e-7
_MOST_ROWS = 16


@dataclass(frozen=True)
class _Own:
    """A rank's part of a gradient: value `at` of its backward pass, as the logical tensor with zeros elsewhere.

    `is_held` marks the elements that the rank holds.
    """

    at: At
    part: Tensor
    is_held: Tensor


@dataclass(frozen=True)
class _Cell:
    """Flat indices of the elements that the same ranks hold."""

    holders: tuple[int, ...]
    index: Tensor


class Addends:
    """Search for wrong sums of the ranks' parts of a gradient."""

    def __init__(self, joint: Joint, one: Program) -> None:
        self._joint, self._one = joint, one

    def explain(self, target: Target) -> Cause | None:
        """Return the cause of a wrong gradient if it is a wrong sum of right parts, else None."""
        shown = self._one.marks[target.mark][-1].value
        whole = None if shown is None else self._one.values[shown].data
        if target.mark[1] != Kind.GRADIENT or whole is None:
            return None
        right = whole.reshape(-1).to(torch.float64)
        for own in self._list_candidates(target, len(right)):
            total = torch.stack([each.part for each in own.values()]).sum(0)
            is_held = torch.stack([each.is_held for each in own.values()]).any(0)
            total, held = total[is_held], right[is_held]
            factor = float(total @ held) / (float(held @ held) or 1.0)
            if factor == 0.0 or not is_right(total, held * factor):
                continue
            parts = {rank: each.part / factor for rank, each in own.items()}
            found = list(self._fit(target, parts, _list_cells(own)))
            if found and all(each is not None for each in found):
                return self._make_cause(target, own, _join(each for each in found if each is not None))
        return None

    def _list_candidates(self, target: Target, size: int) -> Iterator[Mapping[int, _Own]]:
        """Yield the parts of all ranks, for each value that may be their gradient after the backward pass."""
        by_rank = [self._list_own(rank, target, size) for rank in range(len(self._joint.programs))]
        count = max(map(len, by_rank), default=0)
        if all(len(each) in (0, count) for each in by_rank):
            for number in reversed(range(count)):
                yield {rank: each[number] for rank, each in enumerate(by_rank) if each}

    def _list_own(self, rank: int, target: Target, size: int) -> list[_Own]:
        """Return the values of a rank's backward pass with the shape of its gradient, as parts of the whole."""
        program = self._joint.programs[rank]
        shown = {at: region for owner, at, region in self._list_shown(target) if owner == rank}
        bases = {program.base(number).number for _, number in shown}
        if len(bases) != 1:
            return []
        base = (rank, bases.pop())
        shape = self._joint.value(base).shape
        made = sorted(
            number
            for op in map(self._joint.op, self._joint.list_before([base]))
            if op.phase == "backward" and op.step == target.mark[0]
            for number in op.results
            if program.ops[program.values[number].op] is op
            and program.values[number].shape == shape
            and program.values[number].alias < 0
        )
        found = []
        for number in made:
            data = self._joint.data((rank, number))
            if data is None:
                continue
            # The same views that cut the shown values out of the gradient's memory cut the part.
            done = self._joint.execute(Changes(values={base: data}), list(shown))
            part, is_held = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.bool)
            for at, region in shown.items():
                cut = done.data(at)
                if cut is not None and cut.numel() == region.numel:
                    index = region.flat_index().reshape(-1)
                    part[index] = cut.reshape(-1).to(torch.float64)
                    is_held[index] = True
            found.append(_Own((rank, number), part, is_held))
        return found

    def _list_shown(self, target: Target) -> Iterator[tuple[int, At, Region]]:
        """Yield (rank, value, region) of all parts of a tensor that the ranks hold."""
        for rank, program in enumerate(self._joint.programs):
            for each in program.marks.get(target.mark, ()):
                if each.value is not None:
                    yield rank, (rank, each.value), each.region

    def _fit(
        self, target: Target, parts: Mapping[int, Tensor], cells: Sequence[_Cell]
    ) -> Iterator[SumPart | None]:
        """Yield the wrong weights of parts on all ranks, or None where no sum fits."""
        for rank, at, region in self._list_shown(target):
            data = self._joint.data(at)
            if data is None or data.numel() != region.numel:
                yield None
                continue
            actual = torch.full((math.prod(region.shape),), math.nan, dtype=torch.float64)
            actual[region.flat_index().reshape(-1)] = data.reshape(-1).to(torch.float64)
            for cell in cells:
                mine = actual[cell.index]
                wanted = torch.stack([parts[each][cell.index] for each in cell.holders]).sum(0)
                if rank in cell.holders and not bool(mine.isnan().all()) and not is_right(mine, wanted):
                    yield from _weigh(rank, mine, cell, cells, parts, region.shape)

    def _make_cause(self, target: Target, own: Mapping[int, _Own], sums: tuple[SumPart, ...]) -> Cause:
        """Return the cause: the collectives that take the parts, or else the last writers of the gradient."""
        joint = self._joint
        ends = [at for rank, at, _ in self._list_shown(target) if any(rank in each.ranks for each in sums)]
        made = {joint.maker(each.at) for each in own.values()}
        later = joint.list_before(ends) - joint.list_before([each.at for each in own.values()])
        stretch = sorted(later, key=joint.place)
        met = {
            op[0]: op
            for op in stretch
            if joint.op(op).meeting is not None and made & joint.list_before(joint.sources(op))
        }
        found = [met[rank] for rank in dict.fromkeys(rank for rank, _ in ends) if rank in met]
        ops = found or list(dict.fromkeys(map(self._find_writer, ends)))
        return Cause(ops, [], [target], stretch=stretch, known="reduction", sums=sums)

    def _find_writer(self, at: At) -> At:
        """Return the operator that wrote a value last, through views and reads of memory."""
        op = self._joint.maker(skip_moves(self._joint, at))
        while self._joint.op(op).short == READ:
            op = self._joint.maker((op[0], max(self._joint.op(op).refs())))
        return op


def _list_cells(own: Mapping[int, _Own]) -> list[_Cell]:
    """Return the elements of a tensor by the ranks that hold them."""
    ranks = list(own)
    held = torch.stack([own[rank].is_held for rank in ranks])
    patterns, which = torch.unique(held, dim=1, return_inverse=True)
    return [
        _Cell(
            tuple(rank for rank, is_held in zip(ranks, patterns[:, number].tolist(), strict=True) if is_held),
            (which == number).nonzero().reshape(-1),
        )
        for number in range(patterns.shape[1])
    ]


def _weigh(
    rank: int,
    actual: Tensor,
    cell: _Cell,
    cells: Sequence[_Cell],
    parts: Mapping[int, Tensor],
    shape: Sequence[int],
) -> Iterator[SumPart | None]:
    """Yield the wrong weights of the sum of parts that equals a rank's elements of a cell.

    If the cell's own parts do not fit, parts of other cells of the same size are tried, too.
    """
    columns = [(each, cell) for each in cell.holders]
    others = [
        (each, other)
        for other in cells
        if other is not cell and len(other.index) == len(cell.index)
        for each in other.holders
    ]
    weights = _solve(actual, [parts[each][at.index] for each, at in columns])
    if weights is None and others:
        columns += others
        weights = _solve(actual, [parts[each][at.index] for each, at in columns])
    if weights is None:
        yield None
        return
    rows = _name_rows(cell, shape)
    for (source, at), weight in zip(columns, weights, strict=True):
        if weight != float(at is cell):
            other = () if at is cell else _name_rows(at, shape)
            yield SumPart(ranks=(rank,), rows=rows, source=source, source_rows=other, weight=weight)


def _solve(actual: Tensor, parts: Sequence[Tensor]) -> list[float] | None:
    """Return simple fractions as weights of independent parts that add up to `actual`, or None."""
    basis = torch.stack(list(parts), dim=1)
    if len(parts) > min(_MOST_COLUMNS, len(actual) - 1) or not bool(actual.isfinite().all()):
        return None
    if int(torch.linalg.matrix_rank(basis)) < len(parts):
        return None
    fitted = torch.linalg.lstsq(basis, actual[:, None]).solution.reshape(-1)
    simple = [Fraction(each).limit_denominator(_LARGEST) for each in fitted.tolist()]
    weights = torch.tensor([float(each) for each in simple], dtype=torch.float64)
    if (
        any(abs(each.numerator) > _LARGEST for each in simple)
        or float((weights - fitted).abs().max()) > _SAME
    ):
        return None
    is_equal = is_right(basis @ weights, actual) if bool(actual.any()) else not bool(weights.any())
    return weights.tolist() if is_equal else None


def _name_rows(cell: _Cell, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the first indices of a cell in the first dim, if it consists of some whole slices of it."""
    if not shape:
        return ()
    width = math.prod(shape[1:])
    rows = torch.unique(cell.index // max(width, 1))
    is_whole = len(rows) * width == len(cell.index) and len(rows) < shape[0]
    return tuple(rows[:_MOST_ROWS].tolist()) if is_whole else ()


def _join(sums: Iterable[SumPart]) -> tuple[SumPart, ...]:
    """Return the wrong weights, with one record for ranks that have the same one."""
    ranks: dict[SumPart, list[int]] = {}
    for each in sums:
        ranks.setdefault(each.model_copy(update={"ranks": ()}), []).extend(each.ranks)
    return tuple(each.model_copy(update={"ranks": tuple(found)}) for each, found in ranks.items())
