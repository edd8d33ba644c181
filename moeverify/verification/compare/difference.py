"""Differences of two tensors as a few statistics that can be merged over shards and ranks.

All sums are in float64. `measure` leaves its statistics in a tensor on the device, so that a whole step can
be compared without one synchronization per tensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeverify.hashing import FACTORS, GOLDEN_RATIO, STRIDE
from moeverify.triton_support import can_compile

NUM_STATISTICS = 10
# Elements per chunk: on a CPU small enough for its cache, on other devices large enough to fill the device.
_CHUNK, _CHUNK_OF_DEVICE = 1 << 15, 1 << 22
_FEW = 1 << 12  # words that NumPy hashes: there the start of torch's operators costs more than their work
LARGEST = torch.finfo(torch.float64).max
# The integer dtype with which the bits of an element are read, by element size in bytes.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_HOST_INTEGERS = {1: np.uint8, 2: np.int16, 4: np.int32}


@dataclass(frozen=True)
class TensorDifference:
    """Statistics of `actual` against `expected` over some elements of one logical tensor.

    `position` is the row-major position, in the local shard, of the element with the largest error.
    `expected_at` and `actual_at` are the two values there. `num_nonfinite` counts errors that are NaN or
    infinite.
    """

    count: float
    sum_expected2: float
    sum_actual2: float
    sum_product: float
    sum_error2: float
    max_error: float
    position: float
    expected_at: float
    actual_at: float
    num_nonfinite: float

    @classmethod
    def from_statistics(cls, statistics: Sequence[float]) -> TensorDifference:
        """Return the difference from the statistics that `measure` computes."""
        return cls(*statistics)

    def statistics(self) -> list[float]:
        """Return the statistics in the order of `from_statistics`."""
        return [getattr(self, name) for name in self.__dataclass_fields__]

    def merge(self, other: TensorDifference) -> TensorDifference:
        """Return the difference over the union of two disjoint sets of elements."""
        worst = self if self.max_error >= other.max_error else other
        return TensorDifference(
            self.count + other.count,
            self.sum_expected2 + other.sum_expected2,
            self.sum_actual2 + other.sum_actual2,
            self.sum_product + other.sum_product,
            self.sum_error2 + other.sum_error2,
            worst.max_error,
            worst.position,
            worst.expected_at,
            worst.actual_at,
            self.num_nonfinite + other.num_nonfinite,
        )

    @property
    def relative_error(self) -> float:
        """Return |actual - expected| / |expected| in the Frobenius norm, or infinity if it is undefined."""
        if self.num_nonfinite or not math.isfinite(self.sum_error2):
            return math.inf
        # Before the division: zeros that equal zeros have no error.
        if self.sum_error2 == 0.0:
            return 0.0
        return math.sqrt(self.sum_error2 / self.sum_expected2) if self.sum_expected2 > 0.0 else math.inf

    @property
    def scale(self) -> float | None:
        """Return the k that minimizes |actual - k * expected|, or None if the expected values are zero."""
        return self.sum_product / self.sum_expected2 if self.sum_expected2 > 0.0 else None

    @property
    def cosine(self) -> float | None:
        """Return the cosine of the angle between actual and expected values, or None if either is zero."""
        # Two roots, since the product of the sums may overflow, or underflow to zero.
        norms = math.sqrt(self.sum_expected2) * math.sqrt(self.sum_actual2)
        return self.sum_product / norms if norms > 0.0 else None


Read = Callable[[], Tensor | None]
"""Returns the expected values of a shard on the CPU, or None if there are none."""


@dataclass(frozen=True)
class Measured:
    """The result for one shard: the fields of a `TensorDifference`, its hash, and whether the golden has it."""

    statistics: list[float]
    bits: int
    known: bool


def measure(expected: Tensor, actual: Tensor) -> Tensor:
    """Return the statistics of `actual` against `expected`.

    Both tensors have the same shape and any dtype. The result is (NUM_STATISTICS,) float64 on the device of
    `actual`, in the order of the fields of `TensorDifference`.

    Raises: ValueError when the shapes differ.
    """
    if expected.shape != actual.shape:
        raise ValueError(f"cannot compare shape {tuple(actual.shape)} with {tuple(expected.shape)}")
    flat_expected = expected.to(actual.device).reshape(-1)
    flat_actual = actual.reshape(-1)
    size = _chunk_size(flat_actual)
    parts = [
        _measure_chunk(flat_expected[start : start + size], flat_actual[start : start + size], start)
        for start in range(0, flat_actual.numel(), size)
    ]
    if not parts:
        return torch.zeros(NUM_STATISTICS, dtype=torch.float64, device=actual.device)
    return parts[0] if len(parts) == 1 else _merge_statistics(torch.stack(parts))


def _chunk_size(tensor: Tensor) -> int:
    return _CHUNK if tensor.device.type == "cpu" else _CHUNK_OF_DEVICE


def _measure_chunk(expected: Tensor, actual: Tensor, start: int) -> Tensor:
    # float64 has every number of a narrower floating dtype: nothing is rounded before the subtraction.
    e = expected.to(torch.float64)
    a = actual.to(torch.float64)
    error = a - e
    size = error.abs()
    worst = torch.argmax(size)  # argmax treats NaN as the largest value
    nonfinite = error.numel() - torch.count_nonzero(size <= LARGEST)  # false for NaN too
    return torch.stack(
        [
            error.new_tensor(float(error.numel())),
            torch.dot(e, e),
            torch.dot(a, a),
            torch.dot(e, a),
            torch.dot(error, error),
            size[worst],
            (worst + start).to(torch.float64),
            e[worst],
            a[worst],
            nonfinite.to(torch.float64),
        ]
    )


def _merge_statistics(parts: Tensor) -> Tensor:
    """Return the merged statistics of parts (N, NUM_STATISTICS); a NaN error counts as the largest."""
    total = parts.sum(dim=0)  # columns 5 to 8 describe one element, so they come from the worst part
    worst = parts.index_select(0, torch.argmax(parts[:, 5]).reshape(1))[0]
    total[5:9] = worst[5:9]
    return total


def find_worst(values: Tensor, sizes: Tensor) -> Tensor:
    """Return the index of the first largest value in each segment of values (M,).

    `sizes` (N,) are the lengths of the segments. NaN counts as the largest value. Shape: (N,) int64. The
    function does not synchronize with a GPU, so it does not check that the sizes add up to M.
    """
    # NaN fails the comparison, and becomes the largest value.
    rated = torch.where(values <= LARGEST, values, torch.inf)
    largest = torch.segment_reduce(rated, "max", lengths=sizes, unsafe=True)
    largest = largest.repeat_interleave(sizes, output_size=len(values))
    place = torch.arange(len(values), device=values.device)
    # segment_reduce takes no integers; places are exact in float64 up to 2**53.
    behind = torch.where(rated == largest, place, len(values)).to(torch.float64)
    return torch.segment_reduce(behind, "min", lengths=sizes, unsafe=True).to(torch.int64)


def merge_rows(numbers: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return the statistics of `count` tensors from the statistics of their parts.

    Shapes: `numbers` (N,) int64 is the tensor index of each part. `rows` (N, NUM_STATISTICS) has the parts
    of each tensor in order. Returns (count, NUM_STATISTICS), with zeros for a tensor without parts.
    """
    merged = torch.zeros((count, NUM_STATISTICS), dtype=torch.float64)
    if not len(numbers):
        return merged
    # Stable, so that the parts of a tensor are added in the same order in every run.
    order = torch.argsort(numbers, stable=True)
    rows = rows[order]
    present, sizes = torch.unique_consecutive(numbers[order], return_counts=True)
    worst = find_worst(rows[:, 5], sizes)
    total = torch.segment_reduce(rows, "sum", lengths=sizes, axis=0)
    total[:, 5:9] = rows[worst, 5:9]
    merged[present] = total
    return merged


def fingerprint_bits(local: Tensor) -> Tensor:
    """Return a 64-bit hash of the exact values, for the bitwise comparison of replicas and repeated runs.

    Two tensors of one dtype have equal hashes if they are equal bit for bit at every position. Otherwise
    their hashes are equal with a probability of about 2**-64. Shape: () int64, on the device of `local`.
    """
    is_plain = type(local) in (Tensor, torch.nn.Parameter) and local.device.type == "cpu"
    if is_plain and local.numel() * local.element_size() <= 8 * _FEW:
        return torch.tensor(_hash_few(local), dtype=torch.int64)
    words, rest = as_words(local)
    if can_compile(words.device):
        from moeverify.verification.compare.gpu import hash_kernel

        return hash_kernel.hash_words(words, rest)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    size = _chunk_size(words)
    # Keys of the first chunk; a later one only adds that of its start, in wrapping arithmetic.
    places = torch.arange(min(size, words.numel()), device=words.device).mul_(STRIDE)
    for start in range(0, words.numel(), size):
        part = words[start : start + size]
        keyed = torch.mul(part, GOLDEN_RATIO).add_(places[: part.numel()]).add_(_wrap(start * STRIDE))
        total += _scramble(keyed).sum()
    if rest.numel():
        places = torch.arange(words.numel(), words.numel() + rest.numel(), device=words.device)
        total += hash_words(rest, places).sum()
    return total


def _hash_few(local: Tensor) -> int:
    """Return the hash of a tensor of at most `_FEW` words on the CPU; NumPy's operators start faster."""
    data = local.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    num_packed = data.size // 8 * 8
    bits = data[:num_packed].view(np.uint64)
    if num_packed < data.size:
        rest = data[num_packed:].view(_HOST_INTEGERS[local.element_size()]).astype(np.int64)
        bits = np.concatenate((bits, rest.view(np.uint64)))
    mixed = bits * _unsigned(GOLDEN_RATIO)
    mixed += _list_keys()[: len(mixed)]
    for by, factor in ((30, FACTORS[0]), (27, FACTORS[1]), (31, 1)):
        mixed ^= mixed >> np.uint64(by)
        if factor != 1:
            mixed *= _unsigned(factor)
    return _wrap(int(mixed.sum(dtype=np.uint64)))


@functools.cache
def _list_keys() -> npt.NDArray[np.uint64]:
    return np.arange(_FEW + 8, dtype=np.uint64) * _unsigned(STRIDE)


def _unsigned(value: int) -> np.uint64:
    return np.uint64(value % (1 << 64))


def hash_words(words: Tensor, places: Tensor) -> Tensor:
    """Return the contribution of each word (int64) at its place to the hash of its tensor.

    The hash is a sum of mixed words, so spans and ranks can be added in any order. The place is mixed in,
    so that equal words at different places differ.
    """
    return _scramble(torch.mul(words, GOLDEN_RATIO).add_(places * STRIDE))


def as_words(local: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bits of a tensor as int64 words of eight bytes, and the remaining elements as int64.

    Shapes: any; returns (W,) and (R,), with one int64 per remaining element. The split depends only on
    dtype and shape, never on the memory address.
    """
    words, rest = rows_as_words(local.detach().contiguous().reshape(1, -1))
    return words[0], rest[0]


def rows_as_words(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return `as_words` of each row. Shapes: (N, M), contiguous; returns (N, W) and (N, R)."""
    rows = rows.to(torch.uint8) if rows.dtype is torch.bool else rows
    per_word = max(8 // rows.element_size(), 1)
    num_packed = rows.shape[1] // per_word * per_word
    packed, rest = rows[:, :num_packed].reshape(-1), rows[:, num_packed:]
    # `view` requires an offset of whole words (https://docs.pytorch.org/docs/stable/generated/torch.Tensor.view.html),
    # and a kernel that loads a word an aligned address.
    if packed.storage_offset() % per_word or packed.data_ptr() % 8:
        packed = packed.clone()
    words = packed.view(torch.int64).view(len(rows), -1)
    if not rest.shape[1]:
        return words, words.new_empty((len(rows), 0))
    return words, rest.clone().view(INTEGERS[rows.element_size()]).to(torch.int64)


def _scramble(values: Tensor) -> Tensor:
    """Apply `mix` in place with one temporary tensor.

    These passes over memory determine the speed of the hash. torch's right shift of int64 is arithmetic, so
    the sign bits that it shifts in are masked out.
    """
    shifted = torch.empty_like(values)
    for by, factor in ((30, FACTORS[0]), (27, FACTORS[1]), (31, 1)):
        torch.bitwise_right_shift(values, by, out=shifted)
        values.bitwise_xor_(shifted.bitwise_and_((1 << (64 - by)) - 1))
        if factor != 1:
            values.mul_(factor)
    return values


def _wrap(value: int) -> int:
    # torch refuses a number beyond int64, and its sums wrap around in any case.
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
