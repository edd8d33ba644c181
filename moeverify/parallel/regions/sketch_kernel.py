"""`moeverify.parallel.regions.sketch.sketch` of one box on a GPU, in one pass over its values (Triton).

A program reads a tile: up to `_ROWS` rows of one band of blocks, and up to `_COLUMNS` columns of one block.
It adds the rows up with the signs of the rows, then the columns with the signs of the columns, and adds its
numbers to the row of its block. Sums are float64, like those of torch's operations. The sums over the rows of
a tile of 16-bit values are float32: their rounding (1e-7) is far below that of the values (2e-3 and 5e-4).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that the kernel reads."""

_ROWS, _COLUMNS, _UNROLLED = 256, 1024, 8


@dataclass(frozen=True)
class BoxTables:
    """The parts of a box that do not depend on its values, on the device of the values.

    - groups: (G, 3) int64: the first row of a group of rows of one band, their number, and the band
    - turns: (rows,) uint8, where bit k is 1 if the sign of the row in projection k is -1
    - signs: (columns,) uint8, the same of the columns
    - first, width: the first logical column, and the number of columns of a block
    """

    groups: Tensor
    turns: Tensor
    signs: Tensor
    first: int
    width: int

    @classmethod
    def of(cls, bands: Tensor, turns: Tensor, signs: Tensor, first: int, width: int) -> BoxTables:
        """Divide the rows into groups. Shapes: bands (rows,) int64, turns (rows,), signs (columns,) uint8."""
        changes = (bands.diff() != 0).nonzero().reshape(-1) + 1
        groups = [
            (at, min(_ROWS, stop - at))
            for start, stop in pairwise([0, *changes.tolist(), len(bands)])
            for at in range(start, stop, _ROWS)
        ]
        spans = torch.tensor(groups, dtype=torch.int64, device=bands.device)
        return cls(torch.cat([spans, bands[spans[:, :1]]], dim=1), turns, signs, first, width)


def add_box(table: Tensor, values: Tensor, tables: BoxTables) -> None:
    """Add the moments and projections of a box to `table`.

    Shapes: table (bands, blocks across, numbers) float64 and contiguous, values (rows, columns) of any
    strides and one of `DTYPES`. The numbers of a block are 4 moments and the projections.
    """
    stop = tables.first + values.shape[1]
    block = tables.first // tables.width
    across = -(-stop // tables.width) - block
    num_tiles = triton.cdiv(tables.width, _COLUMNS)
    _add_tile[(len(tables.groups), across * num_tiles)](
        table,
        values,
        *values.stride(),
        tables.groups,
        tables.turns,
        tables.signs,
        tables.first,
        stop,
        tables.width,
        block,
        num_tiles,
        table.shape[1],
        table.shape[2],
        table.shape[2] - 4,
        min(_COLUMNS, triton.next_power_of_2(tables.width)),
        tl.float32 if values.dtype.itemsize == 2 else tl.float64,
        _UNROLLED,
    )


@triton.jit
def _add_tile(
    table,
    values,
    row_stride,
    column_stride,
    groups,
    turns,
    signs,
    first,
    stop,
    width,
    block,
    num_tiles,
    across,
    numbers: tl.constexpr,
    num_projections: tl.constexpr,
    num_columns: tl.constexpr,
    dtype: tl.constexpr,
    unrolled: tl.constexpr,
):
    group = groups + tl.program_id(0) * 3
    start = tl.load(group)
    stop_row = start + tl.load(group + 1)
    band = tl.load(group + 2)
    block += tl.program_id(1) // num_tiles
    column = block * width + tl.program_id(1) % num_tiles * num_columns + tl.arange(0, num_columns)
    inside = (column >= first) & (column < stop) & (column < (block + 1) * width)
    place = (column - first).to(tl.int64)
    bits = tl.arange(0, num_projections)
    nonfinite = tl.zeros((num_columns,), dtype=tl.int32)
    total = tl.zeros((num_columns,), dtype=dtype)
    absolute = tl.zeros((num_columns,), dtype=dtype)
    square = tl.zeros((num_columns,), dtype=tl.float64)  # the squares of 16-bit values overflow float32
    projected = tl.zeros((num_projections, num_columns), dtype=dtype)
    for some in range(start, stop_row, unrolled):
        for each in tl.static_range(unrolled):
            row = some + each
            exists = inside & (row + 0 * column < stop_row)
            row = tl.minimum(row, stop_row - 1)
            value = tl.load(values + row * row_stride + place * column_stride, mask=exists, other=0).to(dtype)
            finite = tl.abs(value) < float("inf")  # false for NaN
            value = tl.where(finite, value, 0.0)
            nonfinite += tl.where(finite, 0, 1)
            total += value
            absolute += tl.abs(value)
            wide = value.to(tl.float64)
            square += wide * wide
            turn = 1 - 2 * ((tl.load(turns + row).to(tl.int32) >> bits) & 1)
            projected += turn.to(dtype)[:, None] * value[None, :]
    sign = tl.load(signs + place, mask=inside, other=0).to(tl.int32)
    turn = 1 - 2 * ((sign[None, :] >> bits[:, None]) & 1)
    out = table + (band * across + block) * numbers
    tl.atomic_add(out, tl.sum(nonfinite, axis=0).to(tl.float64))
    tl.atomic_add(out + 1, tl.sum(total.to(tl.float64), axis=0))
    tl.atomic_add(out + 2, tl.sum(absolute.to(tl.float64), axis=0))
    tl.atomic_add(out + 3, tl.sum(square, axis=0))
    tl.atomic_add(out + 4 + bits, tl.sum(projected.to(tl.float64) * turn.to(tl.float64), axis=1))
