"""Relation of a rank's tensor to another process's tensor: which part, which multiple, and the error."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

_MOST_BLOCKS = 64
_LEAST_ELEMENTS = 4
"""Minimum number of elements for a multiple: fewer may be a multiple of others by chance."""

_INFINITE = 1e30
_NUM_SAMPLES = 8


@dataclass(frozen=True)
class Relation:
    """A tensor is `factor` times the part `place` of another tensor, up to a relative `error`.

    The error of integers and masks is the fraction of elements that differ.
    """

    place: str
    error: float
    factor: float = 1.0


@dataclass(frozen=True)
class _Blocks:
    """Blocks of equal shape as the rows of a matrix, with their norms.

    `counts` has the number of blocks along each dim. `holes` marks elements that are not finite and set to
    0; None if there are none.
    """

    rows: Tensor
    holes: Tensor | None
    norms: Tensor
    counts: tuple[int, ...]


class Reference:
    """A tensor of the other side, in which tensors of ranks are looked up.

    A rank's tensor may be the whole tensor or one of equal blocks along one or more dims. It may also have
    rows of this tensor (along the last dim) in any order, with rows of zeros as padding. `bound` is the
    maximum relative error of a match.
    """

    def __init__(self, data: Tensor, bound: float) -> None:
        self._data, self._bound = data, bound
        self._blocks: dict[tuple[int, ...], _Blocks | None] = {}
        self._rows: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def relate(self, mine: Tensor) -> Relation | None:
        """Return the part that is nearest to a tensor; None if no part has its shape."""
        if not mine.numel():
            return Relation("empty", 0.0) if mine.ndim == self._data.ndim else None
        blocks = self._cut(mine.shape)
        if blocks is None:
            return self._find_rows(mine)
        if not _is_real(mine):
            errors = [measure_error(mine.reshape(-1), row) for row in blocks.rows]
            best = min(range(len(errors)), key=errors.__getitem__)
            return Relation(self._name(blocks, mine.shape, best), errors[best])
        flat, holes = _fill(mine.reshape(-1).double())
        dots = blocks.rows @ flat
        nearest = int((blocks.norms.square() - 2 * dots).nan_to_num(math.inf).argmin())
        found = Relation(self._name(blocks, mine.shape, nearest), measure_error(flat, blocks.rows[nearest]))
        if not _is_same(holes, None if blocks.holes is None else blocks.holes[nearest]):
            return Relation(found.place, math.inf)
        if found.error <= self._bound:
            return found
        return self._find_multiple(flat, mine.shape, blocks, dots) or self._find_rows(mine) or found

    def _find_multiple(
        self, flat: Tensor, shape: Sequence[int], blocks: _Blocks, dots: Tensor
    ) -> Relation | None:
        """Return the block that a tensor is a multiple of, or None."""
        if len(flat) < _LEAST_ELEMENTS:
            return None
        best = int((dots.abs() / blocks.norms).nan_to_num(0.0, 0.0, 0.0).argmax())
        size = float(blocks.norms[best]) ** 2
        factor = float(dots[best]) / size if size else 0.0
        if factor == 0.0 or not math.isfinite(factor):
            return None
        error = measure_error(flat, blocks.rows[best] * factor)
        return Relation(self._name(blocks, shape, best), error, factor) if error <= self._bound else None

    def _cut(self, shape: Sequence[int]) -> _Blocks | None:
        """Split the tensor into blocks of a shape; None if that is impossible."""
        key = tuple(shape)
        if key not in self._blocks:
            self._blocks[key] = self._cut_anew(key)
        return self._blocks[key]

    def _cut_anew(self, shape: tuple[int, ...]) -> _Blocks | None:
        whole = tuple(self._data.shape)
        if len(shape) != len(whole) or any(
            large % small for small, large in zip(shape, whole, strict=True) if small
        ):
            return None
        counts = tuple(large // small for small, large in zip(shape, whole, strict=True))
        if not 0 < math.prod(counts) <= _MOST_BLOCKS:
            return None
        split = [size for pair in zip(counts, shape, strict=True) for size in pair]
        order = [*range(0, len(split), 2), *range(1, len(split), 2)]
        data = self._data.double() if _is_real(self._data) else self._data
        rows = data.reshape(split).permute(order).reshape(math.prod(counts), -1)
        if not _is_real(data):
            return _Blocks(rows, None, torch.zeros(len(rows)), counts)
        rows, holes = _fill(rows)
        return _Blocks(rows, holes, rows.norm(dim=1), counts)

    def _name(self, blocks: _Blocks, shape: Sequence[int], number: int) -> str:
        """Return a description of a block's location."""
        names = []
        for dim in reversed(range(len(shape))):
            number, at = divmod(number, blocks.counts[dim])
            if blocks.counts[dim] > 1:
                size = shape[dim]
                names.append(f"dim {dim}: {at * size}-{(at + 1) * size - 1} of {self._data.shape[dim]}")
        return ", ".join(reversed(names)) or "whole"

    def _find_rows(self, mine: Tensor) -> Relation | None:
        """Return the positions of a tensor's rows in this tensor; None if a row is missing."""
        if mine.numel() == self._data.numel() and mine.dtype == self._data.dtype:
            error = measure_error(mine.reshape(-1), self._data.reshape(-1))
            if error <= self._bound:
                return Relation("whole, in another shape", error)
        if not (_is_real(mine) and _is_real(self._data)) or min(mine.ndim, self._data.ndim) < 2:
            return None
        width, whole = mine.shape[-1], self._data.shape[-1]
        if width < 2 or whole % width or whole // width > _MOST_BLOCKS or not self._data.numel():
            return None
        one = mine.reshape(-1, width).double()
        filled = one[(one != 0).any(1)]
        samples = filled[:: max(1, len(filled) // _NUM_SAMPLES)]
        for block in range(whole // width):
            if not self._has_rows(samples, width, block):
                continue
            part, found = self._look_up(filled, width, block)
            error = measure_error(filled, part[found])
            if error <= self._bound:
                columns = f", dim {self._data.ndim - 1}: {block * width}-{(block + 1) * width - 1} of {whole}"
                name = _name_rows(found.tolist(), len(part))
                return Relation(name + (columns if whole > width else ""), error)
        return None

    def _has_rows(self, samples: Tensor, width: int, block: int) -> bool:
        part, found = self._look_up(samples, width, block)
        return measure_error(samples, part[found]) <= self._bound

    def _look_up(self, rows: Tensor, width: int, block: int) -> tuple[Tensor, Tensor]:
        """Return the rows of this tensor, and for each given row the index of the likeliest match.

        Rows are found by their projections on one random vector. Shapes: `rows` (n, h); the result is (m,
        h) and (n,).
        """
        key = width, block
        if key not in self._rows:
            whole = self._data.shape[-1]
            part = self._data.reshape(-1, whole)[:, block * width : (block + 1) * width].double()
            self._rows[key] = (part, *torch.sort(part @ _draw(width)))
        part, values, order = self._rows[key]
        wanted = rows @ _draw(width)
        after = torch.searchsorted(values, wanted).clamp(max=len(values) - 1)
        before = (after - 1).clamp(min=0)
        nearest = torch.where((values[after] - wanted).abs() < (values[before] - wanted).abs(), after, before)
        return part, order[nearest]


def measure_error(mine: Tensor, right: Tensor) -> float:
    """Return norm(mine - right) / norm(right); for integers and masks the fraction of different elements."""
    if not mine.numel():
        return 0.0
    if not (_is_real(mine) or mine.is_complex()):
        return float((mine != right).double().mean())
    error, size = float((mine - right).norm()), float(right.norm())
    if math.isnan(error):
        return math.inf
    return error / size if size else 0.0 if error == 0.0 else math.inf


def _fill(data: Tensor) -> tuple[Tensor, Tensor | None]:
    """Replace infinities, NaN and the fill values of masks by 0; return the tensor and their mask."""
    holes = ~(data.abs() < _INFINITE)
    return (data.masked_fill(holes, 0.0), holes) if bool(holes.any()) else (data, None)


def _is_same(one: Tensor | None, two: Tensor | None) -> bool:
    if one is None or two is None:
        return not any(each is not None and bool(each.any()) for each in (one, two))
    return torch.equal(one, two)


@cache
def _draw(size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _is_real(data: Tensor) -> bool:
    return data.is_floating_point()


def _name_rows(rows: Sequence[int], count: int) -> str:
    """Return a description of the rows of a matrix."""
    if not rows:
        return "padding"
    steps = {second - first for first, second in itertools.pairwise(rows)}
    if steps <= {1}:
        return f"rows {rows[0]}-{rows[-1]} of {count}"
    if len(steps) == 1 and (step := min(steps)) > 1:
        return f"rows {rows[0]}-{rows[-1]} of {count} in steps of {step}"
    if len(set(rows)) < len(rows):
        return f"{len(rows)} rows of {count}, some of them several times"
    return f"{len(rows)} rows of {count} in another order"
