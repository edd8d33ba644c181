"""The work of `measure` and `fingerprint_bits` on a GPU, in one pass over many tensors (Triton).

Done with torch's operations, a comparison writes some ten temporaries in float64 for each element and launches some
forty kernels for each tensor. Here a program reads a span of one tensor and leaves a row of numbers; tables say where
the spans lie, so that one launch serves any number of tensors of one dtype. The rows of a tensor are merged by the
caller.

Each lane of a program sums every `_LANES`-th element of its span, and the lanes are added at the end: sums are taken
in an order that depends on shapes alone, so a comparison that is repeated gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeverify.compare.difference import NUM_STATISTICS, STRIDE
from moeverify.hashing import FACTORS, GOLDEN_RATIO

# Elements, and words of eight bytes, that a program reads: enough programs for a GPU in some megabytes.
SPAN, WORDS = 1 << 13, 1 << 13
_LANES = 1 << 9

_NUM_STATISTICS = tl.constexpr(NUM_STATISTICS)
_LARGEST = tl.constexpr(torch.finfo(torch.float64).max)
_FAR = tl.constexpr(1 << 62)
_GOLDEN_RATIO = tl.constexpr(GOLDEN_RATIO)
_STRIDE = tl.constexpr(STRIDE)
_FIRST_FACTOR, _SECOND_FACTOR = (tl.constexpr(factor) for factor in FACTORS)

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
_BITS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}  # as `as_words` takes a single element


def is_known(dtype: torch.dtype) -> bool:
    """Return whether tensors of this dtype can be read."""
    return dtype in _TYPES


@dataclass(frozen=True)
class Tables:
    """Where tables lie in a tensor of int64, and how many rows each has.

    `measured` (N, 4): the address of a span's actual values, the place of the expected ones (-1: they are zero), how
    many elements (1 to SPAN), and the row-major position of the first one in its tensor.
    `hashed` (M, 5): the address of a span's first word, how many words (at most WORDS), the place of the first one
    in its tensor, the address of elements that fill no word, and how many these are (fewer than 8): they are words
    of their own behind the others, as `as_words` divides.
    """

    measured: int
    num_measured: int
    hashed: int
    num_hashed: int

    @property
    def num_results(self) -> int:
        """Return how many numbers a launch leaves."""
        return NUM_STATISTICS * self.num_measured + self.num_hashed


def compare_spans(memory: Tensor, tables: Tables, expected: Tensor, dtype: torch.dtype, out: Tensor) -> None:
    """Measure spans of tensors of a dtype against `expected`, and hash others; see `measure`, `fingerprint_bits`.

    Shapes: `memory` int64 with the tables, `expected` of any dtype that is known, `out` float64, all flat and on one
    device. `out` begins with NUM_STATISTICS numbers for each measured span; behind them come the bits of the int64
    that each hashed span adds to the hash of its tensor.
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
        _LANES,
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
    behind = tl.load(entry + 1)  # -1: the expected values are zero, and nothing is read for them
    length = tl.load(entry + 2)
    num_expected = tl.where(behind >= 0, length, 0)
    first = tl.load(entry + 3)
    lanes = tl.arange(0, num_lanes)
    sum_expected2 = tl.zeros((num_lanes,), dtype=tl.float64)
    sum_actual2 = tl.zeros((num_lanes,), dtype=tl.float64)
    sum_product = tl.zeros((num_lanes,), dtype=tl.float64)
    sum_error2 = tl.zeros((num_lanes,), dtype=tl.float64)
    num_nonfinite = tl.zeros((num_lanes,), dtype=tl.float64)
    largest = tl.full((num_lanes,), -1.0, dtype=tl.float64)  # below any error: a lane without elements
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
        finite = size <= _LARGEST  # false for what is no number
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
    # Of equal errors the first position counts, as in torch.argmax on the CPU.
    worst = tl.min(tl.where(largest == tl.max(largest, axis=0), place, _FAR), axis=0)
    is_worst = (place == worst) & (largest >= 0.0)  # one lane: those of other positions, and those with none
    e_worst = tl.sum(tl.where(is_worst, e_worst, 0.0), axis=0)
    a_worst = tl.sum(tl.where(is_worst, a_worst, 0.0), axis=0)
    tl.store(row + 0, length.to(tl.float64))
    tl.store(row + 1, tl.sum(sum_expected2, axis=0))
    tl.store(row + 2, tl.sum(sum_actual2, axis=0))
    tl.store(row + 3, tl.sum(sum_product, axis=0))
    tl.store(row + 4, tl.sum(sum_error2, axis=0))
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
    lanes = tl.arange(0, num_lanes).to(tl.int64)
    total = tl.zeros((num_lanes,), dtype=tl.int64)
    for start in range(0, span, num_lanes):
        index = start + lanes
        inside = index < num_words
        word = tl.load(words + index, mask=inside, other=0)
        total += tl.where(inside, _scramble(word, first + index), 0)
    word = tl.load(rest + lanes, mask=lanes < num_rest, other=0).to(tl.int64)
    total += tl.where(lanes < num_rest, _scramble(word, first + num_words + lanes), 0)
    tl.store(out, tl.sum(total, axis=0))


@triton.jit
def _scramble(word, place):
    # `moeverify.hashing.mix`: the finalizer of SplitMix64. Shifts are logical, so they are done unsigned.
    value = (word * _GOLDEN_RATIO + place * _STRIDE).to(tl.uint64, bitcast=True)
    value = (value ^ (value >> 30)).to(tl.int64, bitcast=True) * _FIRST_FACTOR
    value = value.to(tl.uint64, bitcast=True)
    value = (value ^ (value >> 27)).to(tl.int64, bitcast=True) * _SECOND_FACTOR
    value = value.to(tl.uint64, bitcast=True)
    return (value ^ (value >> 31)).to(tl.int64, bitcast=True)
