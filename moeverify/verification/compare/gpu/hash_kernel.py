"""`moeverify.verification.compare.difference.fingerprint_bits` on a GPU (Triton)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeverify.hashing import FACTORS, GOLDEN_RATIO, STRIDE

WORDS = 1 << 13
"""Eight-byte words per program: some megabytes give enough programs for a GPU."""

LANES = 1 << 9
"""Sums of a program that are added at its end: each one has every `LANES`-th element."""

_GOLDEN_RATIO = tl.constexpr(GOLDEN_RATIO)
_STRIDE = tl.constexpr(STRIDE)
_FIRST_FACTOR, _SECOND_FACTOR = (tl.constexpr(factor) for factor in FACTORS)


def hash_words(words: Tensor, rest: Tensor) -> Tensor:
    """Return the hash of a tensor's words and remaining elements, as `fingerprint_bits` does. Shape: () int64.

    Shapes: words (W,) and rest (R,) int64, contiguous, from `as_words`.
    """
    out = torch.empty(max(1, triton.cdiv(len(words), WORDS)), dtype=torch.int64, device=words.device)
    _hash_part[(len(out),)](words, len(words), rest, len(rest), out, WORDS, LANES)
    return out.sum()


@triton.jit
def _hash_part(words, num_words, rest, num_rest, out, span: tl.constexpr, num_lanes: tl.constexpr):
    number = tl.program_id(0)
    first = number.to(tl.int64) * span
    left = num_words - first
    num_rest = tl.where(left <= span, num_rest, 0)
    found = add_words(words + first, tl.minimum(left, span), first, rest, num_rest, span, num_lanes)
    tl.store(out + number, found)


@triton.jit
def add_words(words, num_words, first, rest, num_rest, span: tl.constexpr, num_lanes: tl.constexpr):
    lanes = tl.arange(0, num_lanes).to(tl.int64)
    total = tl.zeros((num_lanes,), dtype=tl.int64)
    for start in range(0, span, num_lanes):
        index = start + lanes
        inside = index < num_words
        word = tl.load(words + index, mask=inside, other=0)
        total += tl.where(inside, _scramble(word, first + index), 0)
    word = tl.load(rest + lanes, mask=lanes < num_rest, other=0).to(tl.int64)
    total += tl.where(lanes < num_rest, _scramble(word, first + num_words + lanes), 0)
    return tl.sum(total, axis=0)


@triton.jit
def _scramble(word, place):
    # `moeverify.hashing.mix`: the finalizer of SplitMix64. Shifts must be logical, so they use unsigned
    # integers.
    value = (word * _GOLDEN_RATIO + place * _STRIDE).to(tl.uint64, bitcast=True)
    value = (value ^ (value >> 30)).to(tl.int64, bitcast=True) * _FIRST_FACTOR
    value = value.to(tl.uint64, bitcast=True)
    value = (value ^ (value >> 27)).to(tl.int64, bitcast=True) * _SECOND_FACTOR
    value = value.to(tl.uint64, bitcast=True)
    return (value ^ (value >> 31)).to(tl.int64, bitcast=True)
