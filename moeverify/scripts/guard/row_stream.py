"""The rows of all forward passes of a rank, with the state of the random generators that drew them."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch
from torch import Tensor

from moeverify.scripts.guard.lines import PassHashes
from moeverify.scripts.record.model import sum_rows

_MOST_PASSES = 1024  # of a run: a stream that repeats later than this may be another epoch


class RowStream:
    """One hash of a row per forward pass. They are read in sampled steps only, as that waits for the device."""

    def __init__(self) -> None:
        self._num_passes = 0
        self._passes: list[tuple[int, Tensor, tuple[int, ...]]] = []

    def add(self, rows: Tensor) -> None:
        """Store the first row of a batch. Shapes: (rows, ...)."""
        if self._num_passes < _MOST_PASSES:
            self._passes.append((self._num_passes, sum_rows(rows[:1]), _hash_generators()))
        self._num_passes += 1

    def take(self) -> tuple[PassHashes, ...]:
        """Return the passes since the last call; synchronizes with the device."""
        passes, self._passes = self._passes, []
        if not passes:
            return ()
        rows = torch.cat([row for _, row, _ in passes]).tolist()
        return tuple(
            PassHashes(number=number, row=row, states=states)
            for (number, _, states), row in zip(passes, rows, strict=True)
        )


def _hash_generators() -> tuple[int, ...]:
    """Return hashes of the states of the CPU generators of torch, Python and, if it is imported, NumPy."""
    states = [torch.get_rng_state().numpy().tobytes(), repr(hash(random.getstate()[1])).encode()]
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        _, keys, *place = numpy.get_state()
        states.append(keys.tobytes() + repr(place).encode())
    return tuple(int.from_bytes(hashlib.blake2b(each, digest_size=7).digest()) for each in states)
