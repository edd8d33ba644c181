"""Sketches of tensors: a record whose size does not depend on the tensor, and that adds up over its regions.

A tensor is cut along every dim into blocks, at most `MOST_BLOCKS` in all, so that a shard, an expert or a
head can be judged alone. A sketch has a row of numbers for each block:

- moments: the number of elements that are not finite, and the sums of x, |x| and x^2
- NUM_PROJECTIONS projections: sums of x with a random sign for each logical index
- a hash of all values at their logical indices, for tensors that must be equal bit for bit

The sign of an element is a product of a sign of its row (all dims but the last) and a sign of its column, each
from a counter-based hash. A rank computes the sketch of its shard in one product of matrices. All numbers are
sums over elements: the sketches of disjoint shards add up to that of the tensor, and those of partial sums
have the projections of their total.

The mean square of a difference of projections estimates the square of the norm of the difference. Elements
whose errors cancel in all projections of a block are invisible. `CONFIDENT` and `OVER` say how far an estimate
may be off.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moeverify.hashing import FACTORS, GOLDEN_RATIO, hash_counter, key_of, mix
from moeverify.parallel.regions.region import Indices, Region
from moeverify.triton_support import can_compile

if TYPE_CHECKING:
    from moeverify.parallel.regions.sketch_kernel import BoxTables

NUM_PROJECTIONS = 8
MOST_BLOCKS = 128
MOMENTS = ("nonfinite", "sum", "absolute", "square")
WIDTH = len(MOMENTS) + NUM_PROJECTIONS
CONFIDENT = {1: 5.0, 2: 2.6, 4: 1.9, 8: 1.6, 16: 1.4}
"""The factor by which an error may be larger than its estimate in one of about 100 cases, by its number of blocks.

An error of rank one is the worst case. The error of one block is at least its difference in norm.
"""

PARTS = 8
"""The part of a tensor for which `find_confidence` holds: the shard of one of so many ranks, or an expert."""

OVER = 2.0
"""The factor by which the error of one block may be smaller than its estimate in one of about 1000 cases."""

_BANDS = 4
_ROW_KEY, _COLUMN_KEY = key_of("sketch", "rows"), key_of("sketch", "columns")
_CHUNK, _CHUNK_OF_DEVICE = 1 << 16, 1 << 25  # elements that are converted to float64 at a time


@dataclass(frozen=True)
class BlockGrid:
    """The blocks of a logical tensor: the number of cuts of every dim, with equal sizes but for the last."""

    shape: tuple[int, ...]
    cuts: tuple[int, ...]

    @classmethod
    @lru_cache(maxsize=4096)
    def of(cls, shape: tuple[int, ...]) -> BlockGrid:
        """Return the blocks of a tensor of this shape.

        Matrices are cut into up to 32 bands of rows and 4 of columns. With three dims the first one has the
        experts, which are cut apart first.
        """
        if len(shape) == 2:
            most = [MOST_BLOCKS // _BANDS, _BANDS]
        else:
            most = [MOST_BLOCKS, *[MOST_BLOCKS // 2] * (len(shape) - 2), 2][: len(shape)]
        cuts: list[int] = []
        for size, limit in zip(shape, most, strict=True):
            cuts.append(_count_cuts(size, max(1, min(limit, MOST_BLOCKS // math.prod(cuts)))))
        if len(shape) > 2 and cuts[-1] == 1 and cuts[-2] % 2 == 0 and shape[-1] % 2 == 0:
            cuts[-2], cuts[-1] = cuts[-2] // 2, 2
        return cls(shape, tuple(cuts))

    @cached_property
    def num_blocks(self) -> int:
        """Return the number of blocks."""
        return math.prod(self.cuts)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Return the size of a block along each dim."""
        return tuple(-(-size // cut) for size, cut in zip(self.shape, self.cuts, strict=True))

    def locate(self, block: int) -> tuple[range, ...]:
        """Return the global indices of a block along each dim."""
        places = []
        for size, cut, step in zip(
            reversed(self.shape), reversed(self.cuts), reversed(self.sizes), strict=True
        ):
            block, place = divmod(block, cut)
            places.append(range(place * step, min((place + 1) * step, size)))
        return tuple(reversed(places))

    def count(self) -> Tensor:
        """Return the number of elements of each block. Shape: (num_blocks,) float64."""
        return self.count_in(Region.whole(self.shape))

    def count_in(self, region: Region) -> Tensor:
        """Return the number of elements of each block within a region. Shape: (num_blocks,) float64."""
        total = torch.zeros(self.num_blocks, dtype=torch.float64)
        for box, _ in _list_boxes(region):
            counts = torch.ones((), dtype=torch.float64)
            for indices, cut, size in zip(box, self.cuts, self.sizes, strict=True):
                along = torch.bincount(_as_tensor(indices, "cpu") // size, minlength=cut)
                counts = counts.unsqueeze(-1) * along.to(torch.float64)
            total += counts.reshape(-1)
        return total


def find_confidence(shape: tuple[int, ...]) -> float:
    """Return the factor by which an error may be larger than its estimate, if it has a part of the tensor.

    The part has at least one in `PARTS` of the blocks. The error of fewer blocks may be larger by up to
    `CONFIDENT[1]`.
    """
    reached = BlockGrid.of(shape).num_blocks // PARTS
    return CONFIDENT[max(count for count in CONFIDENT if count <= max(1, reached))]


def _count_cuts(size: int, most: int) -> int:
    """Return the largest divisor of a size up to `most`; if it is small, as many equal parts as possible."""
    if size <= most:
        return max(size, 1)
    divisor = next(cuts for cuts in range(most, 0, -1) if size % cuts == 0)
    return divisor if 4 * divisor >= most else -(-size // -(-size // most))


@torch.no_grad()
def sketch(local: Tensor, region: Region) -> Tensor:
    """Return the moments and projections of a region. Shape: (num_blocks, WIDTH) float64, on its device.

    `local` has shape `region.local_shape`. Elements that are not finite count, and are zero in all sums.
    """
    grid = BlockGrid.of(region.shape)
    rows = torch.zeros((grid.num_blocks, WIDTH), dtype=torch.float64, device=local.device)
    for box, start in _list_boxes(region):
        shape = [len(indices) for indices in box]
        count = math.prod(shape)
        if count:
            part = local if region.flat is None else local.reshape(-1)[start : start + count]
            _add_box(rows, grid, part.reshape(shape), box)
    return rows


def _add_box(rows: Tensor, grid: BlockGrid, local: Tensor, box: tuple[Indices, ...]) -> None:
    if not box:
        local, box, grid = local.reshape(1), (range(1),), BlockGrid((1,), (1,))
    flat = local.reshape(-1, len(box[-1]))
    table = rows.view(-1, grid.cuts[-1], WIDTH)
    if isinstance(box[-1], range) and can_compile(local.device):
        _add_in_one_pass(table, grid, flat, box)
    else:
        _add_in_chunks(table, grid, flat, box)


def _add_in_one_pass(table: Tensor, grid: BlockGrid, flat: Tensor, box: tuple[Indices, ...]) -> None:
    from moeverify.parallel.regions.sketch_kernel import DTYPES, add_box

    values = flat if flat.dtype in DTYPES else flat.to(torch.float64)
    add_box(table, values, _tabulate(grid, box, flat.device))


@lru_cache(maxsize=4096)
def _tabulate(grid: BlockGrid, box: tuple[Indices, ...], device: torch.device) -> BoxTables:
    from moeverify.parallel.regions.sketch_kernel import BoxTables

    lead, bands = _locate_rows(grid, box, device)
    turns, signs = (
        (hash_counter(key, index) & ((1 << NUM_PROJECTIONS) - 1)).to(torch.uint8)
        for key, index in ((_ROW_KEY, lead), (_COLUMN_KEY, _as_tensor(box[-1], device)))
    )
    return BoxTables.of(bands, turns, signs, min(box[-1]), grid.sizes[-1])


def _locate_rows(grid: BlockGrid, box: tuple[Indices, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the logical row of each local row, flattened, and its band of blocks. Shapes: (rows,) int64."""
    lead = torch.zeros(1, dtype=torch.int64, device=device)
    bands = torch.zeros(1, dtype=torch.int64, device=device)
    for indices, size, cut, step in zip(box[:-1], grid.shape, grid.cuts, grid.sizes, strict=False):
        along = _as_tensor(indices, device)
        lead = (lead[:, None] * size + along).reshape(-1)
        bands = (bands[:, None] * cut + along // step).reshape(-1)
    return lead, bands


def _add_in_chunks(table: Tensor, grid: BlockGrid, flat: Tensor, box: tuple[Indices, ...]) -> None:
    device = flat.device
    lead, bands = _locate_rows(grid, box, device)
    columns = _as_tensor(box[-1], device)
    # The columns of the blocks that the box reaches. Those that it does not have are zero.
    width = grid.sizes[-1]
    first, last = min(box[-1]) // width, max(box[-1]) // width
    across, start = last - first + 1, first * width
    is_complete = box[-1] == range(start, start + across * width)
    signs = _draw_signs(_COLUMN_KEY, torch.arange(start, start + across * width, device=device))
    signs = signs.view(across, width, NUM_PROJECTIONS)
    size = _CHUNK if device.type == "cpu" else _CHUNK_OF_DEVICE
    step = max(1, size // (across * width))
    reached = table[:, first : last + 1]
    for at in range(0, len(lead), step):
        values = flat[at : at + step]
        if not is_complete:
            values = values.new_zeros(len(values), across * width).index_copy_(1, columns - start, values)
        part = _measure(values.view(-1, across, width), signs, lead[at : at + step])
        reached.index_add_(0, bands[at : at + step], part)


def _measure(values: Tensor, signs: Tensor, lead: Tensor) -> Tensor:
    """Return the contribution of each row to its blocks. Shape: (rows, blocks across, WIDTH).

    Shapes: values (rows, blocks across, width), signs (blocks across, width, NUM_PROJECTIONS), lead (rows,).
    Only the products need a copy in float64.
    """
    finite = values.isfinite()
    values = torch.where(finite, values, 0)
    moments = [
        values.shape[-1] - finite.sum(dim=-1, dtype=torch.float64),
        values.sum(dim=-1, dtype=torch.float64),
        torch.linalg.vector_norm(values, 1, dim=-1, dtype=torch.float64),
        torch.linalg.vector_norm(values, 2, dim=-1, dtype=torch.float64).square(),
    ]
    # The sign of an element is that of its column times that of its row: one product does all columns.
    projected = torch.bmm(values.to(torch.float64).transpose(0, 1), signs).transpose(0, 1)
    turns = _draw_signs(_ROW_KEY, lead)
    return torch.cat([torch.stack(moments, dim=-1), projected * turns[:, None, :]], dim=-1)


def _draw_signs(key: int, index: Tensor) -> Tensor:
    """Return a random sign of each index for each projection. Shape: (len(index), NUM_PROJECTIONS) float64."""
    shifts = torch.arange(NUM_PROJECTIONS, device=index.device)
    bits = (hash_counter(key, index)[:, None] >> shifts) & 1
    return 1.0 - 2.0 * bits.to(torch.float64)


@torch.no_grad()
def hash_blocks(local: Tensor, region: Region) -> Tensor:
    """Return a hash of the values of each block. Shape: (num_blocks,) int64, on the device of `local`.

    Values are hashed as float64 or int64, so that a narrower dtype with equal values has an equal hash.
    """
    grid = BlockGrid.of(region.shape)
    total = torch.zeros(grid.num_blocks, dtype=torch.int64, device=local.device)
    places = region.flat_index(local.device).reshape(-1)
    values = local.detach().reshape(-1)
    step = _CHUNK if local.device.type == "cpu" else _CHUNK_OF_DEVICE
    for start in range(0, len(values), step):
        place, value = places[start : start + step], values[start : start + step]
        # -0.0 + 0.0 is 0.0: equal values have equal hashes.
        wide = value.to(torch.float64) + 0.0 if value.is_floating_point() else value.to(torch.int64)
        words = mix(wide.view(torch.int64) * GOLDEN_RATIO + place * FACTORS[0])
        total.index_add_(0, _find_blocks(grid, place), words)
    return total


def _find_blocks(grid: BlockGrid, place: Tensor) -> Tensor:
    found, stride = torch.zeros_like(place), 1
    for size, cut, step in zip(reversed(grid.shape), reversed(grid.cuts), reversed(grid.sizes), strict=True):
        found += (place % size) // step * stride
        place = place // size
        stride *= cut
    return found


def estimate_squares(expected: Tensor, actual: Tensor) -> Tensor:
    """Return the estimated square of the norm of the difference in each block. Shapes: (..., WIDTH) to (...).

    The difference of the norms is a lower bound that holds without chance.
    """
    first = len(MOMENTS)
    # For random signs s the mean of (s . d)^2 is |d|^2.
    apart = (actual[..., first:] - expected[..., first:]).square().mean(dim=-1)
    # A region may have been subtracted, and rounding then leaves a square below zero.
    square = MOMENTS.index("square")
    norms = (actual[..., square].clamp(min=0).sqrt() - expected[..., square].clamp(min=0).sqrt()).square()
    return torch.maximum(apart, norms)


def _list_boxes(region: Region) -> Iterator[tuple[tuple[Indices, ...], int]]:
    """Yield boxes that make up a region, each with its first position in the local tensor."""
    if region.flat is None:
        yield region.dims, 0
        return
    yield from _cut_run(region.shape, region.flat.start, region.flat.stop, 0)


def _cut_run(
    shape: tuple[int, ...], start: int, stop: int, position: int
) -> Iterator[tuple[tuple[Indices, ...], int]]:
    """Yield the boxes of a range of the flattened tensor: a part of a first row, whole rows, a last part."""
    if start >= stop:
        return
    if len(shape) < 2:
        yield (((range(start, stop)),) if shape else ()), position
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:  # within one row
        row = start // inner
        for box, at in _cut_run(shape[1:], start - row * inner, stop - row * inner, position):
            yield (range(row, row + 1), *box), at
        return
    for box, at in _cut_run(shape[1:], start - (first - 1) * inner, inner, position) if start % inner else ():
        yield (range(first - 1, first), *box), at
    if first < last:
        yield (range(first, last), *map(range, shape[1:])), position + first * inner - start
    for box, at in _cut_run(shape[1:], 0, stop - last * inner, position + last * inner - start):
        yield (range(last, last + 1), *box), at


def _as_tensor(indices: Indices, device: torch.device | str) -> Tensor:
    if isinstance(indices, range):
        return torch.arange(indices.start, indices.stop, device=device)
    return torch.tensor(indices, dtype=torch.int64, device=device)
