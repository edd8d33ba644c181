"""Fingerprints: a few numbers that represent a tensor and detect a permutation of it.

They are the norm and the projections on two fixed vectors of random signs. A bitwise hash would not work,
because two machines compute the same golden only up to rounding, and their fingerprints must agree to that
precision.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from moeverify.hashing import CHUNK, hash_counter, key_of
from moeverify.verification.golden.proximity import Fingerprint

_KEYS = (key_of("fingerprint", 1), key_of("fingerprint", 2))
_DIGITS = 13


class Fingerprints:
    """Computes the fingerprints of many tensors.

    The signs at a position are the same for every tensor. They are computed once and cached, with two bytes
    per element of the largest tensor. Recomputing them took three quarters of the time of a golden with a
    large vocabulary.
    """

    def __init__(self) -> None:
        self._signs: list[Tensor] = []  # one tensor per chunk of positions, (2, CHUNK) int8

    def make(self, tensor: Tensor) -> Fingerprint:
        """Return [norm, projection, projection] of a floating point tensor, or a hash of any other tensor.

        Shape: any. The numbers are computed in float64 and rounded to 13 digits. The hash is the first 16
        hexadecimal digits of SHA-256 over the values as int64. The tensor must be on the CPU.
        """
        if not tensor.is_floating_point():
            content = tensor.to(torch.int64).contiguous().numpy().tobytes()
            return hashlib.sha256(content).hexdigest()[:16]
        flat = tensor.reshape(-1)
        sums = torch.zeros(3, dtype=torch.float64)
        for number, start in enumerate(range(0, len(flat), CHUNK)):
            values = flat[start : start + CHUNK].to(torch.float64)
            signs = self._find_signs(number)[:, : len(values)].to(torch.float64)
            sums[0] += torch.dot(values, values)
            sums[1:] += torch.mv(signs, values)
        sums[0] = sums[0].sqrt()
        return [float(f"{value:.{_DIGITS}g}") for value in sums.tolist()]

    def _find_signs(self, chunk: int) -> Tensor:
        """Return the signs at a chunk of positions, for each projection. Shape: (2, CHUNK) int8."""
        while len(self._signs) <= chunk:
            start = len(self._signs) * CHUNK
            places = torch.arange(start, start + CHUNK)
            bits = torch.stack([hash_counter(key, places) & 1 for key in _KEYS])
            self._signs.append((1 - 2 * bits).to(torch.int8))
        return self._signs[chunk]
