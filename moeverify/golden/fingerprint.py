"""A few numbers that stand for a whole tensor and would notice a permutation of it.

The norm, and the tensor's projections on two fixed vectors of random signs. Numbers, not a hash of bits: two
machines compute the same golden up to rounding, and their fingerprints must agree to that.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from moeverify.golden.proximity import Fingerprint
from moeverify.hashing import hash_counter, key_of

_KEYS = (key_of("fingerprint", 1), key_of("fingerprint", 2))
_CHUNK = 1 << 22
_DIGITS = 13


def fingerprint(tensor: Tensor) -> Fingerprint:
    """Return [norm, projection, projection] of a floating point tensor, a hash of the values of any other."""
    if not tensor.is_floating_point():
        content = tensor.to(torch.int64).contiguous().numpy().tobytes()
        return hashlib.sha256(content).hexdigest()[:16]
    flat = tensor.reshape(-1)
    sums = torch.zeros(3, dtype=torch.float64)
    for start in range(0, len(flat), _CHUNK):
        values = flat[start : start + _CHUNK].to(torch.float64)
        place = torch.arange(start, start + len(values))
        sums[0] += torch.dot(values, values)
        for number, key in enumerate(_KEYS):
            sign = 1.0 - 2.0 * (hash_counter(key, place) & 1).to(torch.float64)
            sums[1 + number] += torch.dot(values, sign)
    sums[0] = sums[0].sqrt()
    return [float(f"{value:.{_DIGITS}g}") for value in sums.tolist()]
