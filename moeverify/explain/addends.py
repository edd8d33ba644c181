"""Gradients of replicas as sums of the ranks' own parts, whatever groups the layout reduces them over.

Each rank that holds an element of a parameter computes a part of its gradient in the backward pass. If the
parts of all ranks add up to the gradient of one device, the backward pass is right, and a wrong gradient is
a wrong sum of these parts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from moeverify.explain.cause import OperatorCause
from moeverify.explain.compare import is_right
from moeverify.explain.cuts import list_rows
from moeverify.explain.joint import At, Changes, Joint
from moeverify.explain.program import Program
from moeverify.explain.suspects import Target
from moeverify.parallel.regions.region import Region
from moeverify.results.checks import Kind
from moeverify.results.culprit import SumPart

_MOST_COLUMNS = 32
_LARGEST = 64
"""Maximum denominator of the weight of a part."""

_Regions = Mapping[int, Mapping[At, Region]]
"""The shown values of a gradient on each rank, with their regions."""

_Part = tuple[At, Callable[[At], Tensor | None]]
"""A value that may be a rank's part of a gradient, and its data for each shown value."""


@dataclass(frozen=True)
class _Cell:
    """Flat indices of the elements that the same ranks hold."""

    holders: tuple[int, ...]
    index: Tensor


class Addends:
    """Search for wrong sums of the ranks' parts of a gradient."""

    def __init__(self, joint: Joint, one: Program) -> None:
        self._joint, self._one = joint, one

    def explain(self, target: Target) -> OperatorCause | None:
        """Return the cause of a wrong gradient if it is a wrong sum of right parts, else None."""
        number = self._one.marks[target.mark][-1].value
        right = None if number is None else self._one.values[number].data
        if target.mark[1] != Kind.GRADIENT or right is None:
            return None
        expected = right.reshape(-1).to(torch.float64)
        shown = {
            rank: {(rank, each.value): each.region for each in parts if each.value is not None}
            for rank, program in enumerate(self._joint.programs)
            if (parts := program.marks.get(target.mark, ()))
        }
        actual = {rank: _spread(expected, regions, self._joint.data) for rank, regions in shown.items()}
        cells = _list_cells(actual)
        made = (reversed(self._list_own(rank, target.mark[0], held)) for rank, held in shown.items())
        for own in zip(*made, strict=False):
            spread = [
                _spread(expected, shown[rank], read) for rank, (_, read) in zip(shown, own, strict=True)
            ]
            total = torch.stack(spread).nansum(0)
            held = torch.where(torch.stack(spread).isnan().all(0), 0.0, expected)
            factor = float(total @ held) / (float(held @ held) or 1.0)
            if factor == 0.0 or not is_right(total, held * factor):
                continue
            scaled = {rank: each / factor for rank, each in zip(shown, spread, strict=True)}
            weighed = [
                list(_weigh(rank, actual[rank][cell.index], cell, cells, scaled, right.shape))
                for cell in cells
                for rank in cell.holders
            ]
            sums = _join(part for each in weighed for part in each if part is not None)
            is_own = not any(each.source_rows for each in sums)
            is_multiple = is_own and all(weighed) and len({each.weight for each in sums}) == 1
            if sums and not is_multiple and not any(None in each for each in weighed):
                return self._make_cause(target, [at for at, _ in own], shown, sums)
        return None

    def _list_own(self, rank: int, step: int, shown: Mapping[At, Region]) -> list[_Part]:
        """Return the values of a rank's backward pass with the shape of its gradient, in program order."""
        program = self._joint.programs[rank]
        bases = {program.base(number).number for _, number in shown}
        if len(bases) != 1:
            return []
        base = (rank, bases.pop())
        shape = self._joint.value(base).shape
        made = sorted(
            number
            for op in self._joint.list_before([base])
            if op[0] == rank and (self._joint.op(op).phase, self._joint.op(op).step) == ("backward", step)
            for number in self._joint.op(op).results
            if program.values[number].shape == shape and program.values[number].alias < 0
        )
        # The same views that cut the shown values out of the gradient's memory cut these values.
        return [
            ((rank, number), self._joint.execute(Changes(values={base: data}), list(shown)).data)
            for number in made
            if (data := program.values[number].data) is not None
        ]

    def _make_cause(
        self, target: Target, own: Sequence[At], shown: _Regions, sums: tuple[SumPart, ...]
    ) -> OperatorCause:
        """Return the cause: the collectives that take the parts, or else the last writers of the gradient."""
        joint = self._joint
        ends = [
            at for rank, parts in shown.items() if any(rank in each.ranks for each in sums) for at in parts
        ]
        made = set(map(joint.maker, own))
        stretch = sorted(joint.list_before(ends) - joint.list_before(own), key=joint.place)
        size = min(math.prod(joint.value(at).shape) for at in own)
        met = [op for op in stretch if joint.op(op).meeting and made & joint.list_before(joint.sources(op))]
        # A smaller result, such as the norm of all gradients, does not have the elements of the sum.
        met = [op for op in met if math.prod(joint.value((op[0], joint.op(op).results[0])).shape) >= size]
        last = {op[0]: op for op in met or [op for op in stretch if joint.op(op).written]}
        ops = [last.get(at[0], joint.maker(at)) for at in {at[0]: at for at in ends}.values()]
        return OperatorCause(ops, [], [target], stretch=stretch, known="reduction", sums=sums)


def _spread(expected: Tensor, regions: Mapping[At, Region], read: Callable[[At], Tensor | None]) -> Tensor:
    """Return a rank's elements at their places in the flat logical tensor, NaN elsewhere."""
    found = torch.full_like(expected, math.nan)
    for at, region in regions.items():
        data = read(at)
        if data is not None and data.numel() == region.numel and math.prod(region.shape) == len(found):
            found[region.flat_index().reshape(-1)] = data.reshape(-1).to(torch.float64)
    return found


def _list_cells(actual: Mapping[int, Tensor]) -> list[_Cell]:
    """Return the elements of a tensor by the ranks that hold them."""
    is_held = ~torch.stack(list(actual.values())).isnan()
    patterns, which = torch.unique(is_held, dim=1, return_inverse=True)
    return [
        _Cell(tuple(itertools.compress(actual, pattern)), (which == number).nonzero().reshape(-1))
        for number, pattern in enumerate(patterns.T.tolist())
    ]


def _weigh(
    rank: int,
    actual: Tensor,
    cell: _Cell,
    cells: Sequence[_Cell],
    parts: Mapping[int, Tensor],
    shape: Sequence[int],
) -> Iterator[SumPart | None]:
    """Yield the wrong weights of parts in a rank's elements of a cell, or None if no sum of parts fits.

    If the cell's own parts do not fit, parts of other cells of the same size are tried, too.
    """
    columns = [(each, cell) for each in cell.holders]
    data = [parts[each][cell.index] for each in cell.holders]
    if is_right(actual, torch.stack(data).sum(0)):
        return
    weights = _solve(actual, data)
    others = [(each, other) for other in cells if other is not cell for each in other.holders]
    others = [each for each in others if len(each[1].index) == len(cell.index)]
    if weights is None and others:
        columns += others
        weights = _solve(actual, [parts[each][at.index] for each, at in columns])
    if weights is None:
        yield None
        return
    for (source, at), weight in zip(columns, weights, strict=True):
        if weight != float(at is cell):
            rows, other = list_rows(cell.index, shape), () if at is cell else list_rows(at.index, shape)
            yield SumPart(ranks=(rank,), rows=rows, source=source, source_rows=other, weight=weight)


def _solve(actual: Tensor, parts: Sequence[Tensor]) -> list[float] | None:
    """Return simple fractions as weights of independent parts that add up to `actual`, or None."""
    basis = torch.stack(list(parts), dim=1)
    if len(parts) > min(_MOST_COLUMNS, len(actual) - 1) or not bool(actual.isfinite().all()):
        return None
    if int(torch.linalg.matrix_rank(basis)) < len(parts):
        return None
    fitted = torch.linalg.lstsq(basis, actual[:, None]).solution.reshape(-1)
    simple = [float(Fraction(each).limit_denominator(_LARGEST)) for each in fitted.tolist()]
    made = basis @ torch.tensor(simple, dtype=torch.float64)
    return simple if is_right(made, actual) or not (made.any() or actual.any()) else None


def _join(sums: Iterable[SumPart]) -> tuple[SumPart, ...]:
    """Return the wrong weights, with one record for ranks that have the same one."""
    ranks: dict[SumPart, list[int]] = {}
    for each in sums:
        ranks.setdefault(each.model_copy(update={"ranks": ()}), []).extend(each.ranks)
    return tuple(each.model_copy(update={"ranks": tuple(found)}) for each, found in ranks.items())
