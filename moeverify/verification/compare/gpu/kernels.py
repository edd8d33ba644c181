"""`measure` and `fingerprint_bits` on a GPU, in one pass over many tensors (Triton).

With torch operations, a comparison writes about ten float64 temporaries per element and launches about
forty kernels per tensor. Here, each program reads a span of one tensor and writes a row of numbers. Tables
give the addresses of the spans, so one launch serves any number of tensors of one dtype. The caller merges
the rows of a tensor.

Each lane of a program sums every `LANES`-th element of its span, and the lanes are added at the end. The
order of summation depends only on shapes, so a repeated comparison gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeverify.verification.compare.difference import NUM_STATISTICS
from moeverify.verification.compare.gpu.hash_kernel import LANES, WORDS, add_words

SPAN = 1 << 13  # elements per program: some megabytes give enough programs for a GPU

_NUM_STATISTICS = tl.constexpr(NUM_STATISTICS)
_LARGEST = tl.constexpr(torch.finfo(torch.float64).max)
_FAR = tl.constexpr(1 << 62)

_TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int64: tl.int64,
    torch.int32: tl.int32,
    torch.int16: tl.int16,
    torch.int8: tl.int8,
    torch.uint8: tl.uint8,
    torch.bool: tl.uint8,
}
_BITS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}  # as `as_words` reads a single element


def is_known(dtype: torch.dtype) -> bool:
    """Return whether the kernels support this dtype."""
    return dtype in _TYPES


@dataclass(frozen=True)
class Tables:
    """Offsets of the two tables in an int64 tensor, and their numbers of rows.

    Columns of `measured` (N, 4):

    - address of the actual values of a span
    - offset of its expected values, or -1 for zeros
    - number of elements (1 to SPAN)
    - row-major position of the first element in its tensor

    Columns of `hashed` (M, 5):

    - address of the first word of a span
    - number of words (at most WORDS)
    - position of the first word in its tensor
    - address of the remaining elements, which fill no word
    - number of these elements (fewer than 8); each is a word of its own after the others, as in `as_words`
    """

    measured: int
    num_measured: int
    hashed: int
    num_hashed: int

    @property
    def num_results(self) -> int:
        """Return the number of float64 values that a launch writes."""
        return NUM_STATISTICS * self.num_measured + self.num_hashed


def compare_spans(memory: Tensor, tables: Tables, expected: Tensor, dtype: torch.dtype, out: Tensor) -> None:
    """Measure and hash spans of tensors of one dtype; see `measure` and `fingerprint_bits`.

    All tensors are flat and on one device: `memory` int64 with the tables, `expected` of any known dtype,
    and `out` float64. `out` starts with NUM_STATISTICS numbers per measured span. These are followed by the
    contribution of each hashed span to the hash of its tensor, as the bits of an int64.
    """
    _compare[(tables.num_measured + tables.num_hashed,)](
        memory,
        tables.measured,
        tables.num_measured,
        tables.hashed,
        expected,
        out,
        _TYPES[dtype],
        _BITS[dtype.itemsize],
        SPAN,
        WORDS,
        LANES,
    )


@triton.jit(do_not_specialize=["measured", "num_measured", "hashed"])
def _compare(
    memory,
    measured,
    num_measured,
    hashed,
    expected,
    out,
    dtype: tl.constexpr,
    bits: tl.constexpr,
    span: tl.constexpr,
    num_words: tl.constexpr,
    num_lanes: tl.constexpr,
):
    number = tl.program_id(0)
    if number < num_measured:
        _measure_span(
            memory + measured + number * 4, expected, out + number * _NUM_STATISTICS, dtype, span, num_lanes
        )
    else:
        number -= num_measured
        sums = (out + num_measured * _NUM_STATISTICS).to(tl.pointer_type(tl.int64), bitcast=True)
        _hash_span(memory + hashed + number * 5, sums + number, bits, num_words, num_lanes)


@triton.jit
def _measure_span(entry, expected, row, dtype: tl.constexpr, span: tl.constexpr, num_lanes: tl.constexpr):
    actual = tl.load(entry).to(tl.pointer_type(dtype))
    behind = tl.load(entry + 1)  # -1: the expected values are zero and are not read
    length = tl.load(entry + 2)
    num_expected = tl.where(behind >= 0, length, 0)
    first = tl.load(entry + 3)
    lanes = tl.arange(0, num_lanes)
    sum_expected2 = tl.zeros((num_lanes,), dtype=tl.float64)
    sum_actual2 = tl.zeros((num_lanes,), dtype=tl.float64)
    sum_product = tl.zeros((num_lanes,), dtype=tl.float64)
    sum_error2 = tl.zeros((num_lanes,), dtype=tl.float64)
    num_nonfinite = tl.zeros((num_lanes,), dtype=tl.float64)
    largest = tl.full((num_lanes,), -1.0, dtype=tl.float64)  # below any error, for lanes without elements
    place = tl.zeros((num_lanes,), dtype=tl.int64)
    e_worst = tl.zeros((num_lanes,), dtype=tl.float64)
    a_worst = tl.zeros((num_lanes,), dtype=tl.float64)
    for start in range(0, span, num_lanes):
        index = start + lanes.to(tl.int64)
        inside = index < length
        a = tl.load(actual + index, mask=inside, other=0).to(tl.float64)
        e = tl.load(expected + behind + index, mask=index < num_expected, other=0).to(tl.float64)
        error = a - e
        size = tl.abs(error)
        finite = size <= _LARGEST  # false for NaN
        sum_expected2 += e * e
        sum_actual2 += a * a
        sum_product += e * a
        sum_error2 += error * error
        num_nonfinite += tl.where(inside & (finite == 0), 1.0, 0.0)
        rated = tl.where(inside, tl.where(finite, size, float("inf")), -1.0)
        worse = rated > largest
        place = tl.where(worse, index, place)
        e_worst = tl.where(worse, e, e_worst)
        a_worst = tl.where(worse, a, a_worst)
        largest = tl.maximum(largest, rated)
    # For equal errors the first position counts, as with torch.argmax on the CPU.
    worst = tl.min(tl.where(largest == tl.max(largest, axis=0), place, _FAR), axis=0)
    is_worst = (place == worst) & (largest >= 0.0)  # exactly one lane
    e_worst = tl.sum(tl.where(is_worst, e_worst, 0.0), axis=0)
    a_worst = tl.sum(tl.where(is_worst, a_worst, 0.0), axis=0)
    tl.store(row + 0, length.to(tl.float64))
    tl.store(row + 1, tl.sum(sum_expected2, axis=0))
    tl.store(row + 2, tl.sum(sum_actual2, axis=0))
    tl.store(row + 3, tl.sum(sum_product, axis=0))
    tl.store(row + 4, tl.sum(sum_error2, axis=0))
    # Not `largest`, which is infinite where the error is NaN.
    tl.store(row + 5, tl.abs(a_worst - e_worst))
    tl.store(row + 6, (first + worst).to(tl.float64))
    tl.store(row + 7, e_worst)
    tl.store(row + 8, a_worst)
    tl.store(row + 9, tl.sum(num_nonfinite, axis=0))


@triton.jit
def _hash_span(entry, out, bits: tl.constexpr, span: tl.constexpr, num_lanes: tl.constexpr):
    words = tl.load(entry).to(tl.pointer_type(tl.int64))
    num_words = tl.load(entry + 1)
    first = tl.load(entry + 2)
    rest = tl.load(entry + 3).to(tl.pointer_type(bits))
    num_rest = tl.load(entry + 4)
    tl.store(out, add_words(words, num_words, first, rest, num_rest, span, num_lanes))
