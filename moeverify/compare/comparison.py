"""An observer that compares every piece with the golden where the piece lives, and keeps only numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moeverify.compare.batch import Differences, Fingerprints
from moeverify.compare.checks import UNCOMPARED_KINDS, ZERO_KINDS
from moeverify.compare.difference import Difference
from moeverify.layout.region import Region


class Reference(Protocol):
    """Where the expected values come from: a stored golden, or anything else that reads regions."""

    def read(self, step: int, kind: str, name: str, region: Region) -> Tensor | None:
        """Return a region of a logical tensor, or None where there is no such tensor."""


@dataclass(frozen=True)
class Entry:
    """What one rank found out about one piece.

    `bits` hashes the exact local values; pieces of one region must agree in it on every rank. `state` is
    `compared`, `absent` (the run has no such tensor here), or `unexpected` (the golden has none).
    """

    step: int
    kind: str
    name: str
    region: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    state: str
    bits: int
    difference: Difference
    index: tuple[int, ...] = ()


class Comparison:
    """Compares what it observes with a reference; `entries` gives the result once the run is over.

    Nothing waits for the device while the run goes on: statistics stay in tensors until `entries`.
    """

    def __init__(self, reference: Reference, *, hash_bits: bool = True) -> None:
        self._reference = reference
        self._hash_bits = hash_bits
        self._pending: list[tuple[int, str, str, Region, str, tuple[int, ...]]] = []
        self._differences = Differences()
        self._bits = Fingerprints()

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Compare one piece; see `moeverify.layout.observer.Observer`."""
        if kind in UNCOMPARED_KINDS:
            return
        expected = None if kind in ZERO_KINDS else self._reference.read(step, kind, name, region)
        known = expected is not None or kind in ZERO_KINDS
        state = "absent" if local is None else "compared" if known else "unexpected"
        if local is None:
            actual = torch.zeros(region.local_shape, dtype=torch.float64)
        else:
            actual = local.detach().reshape(region.local_shape)
        self._differences.add(expected, actual)
        if self._hash_bits:
            self._bits.add(actual)
        self._pending.append((step, kind, name, region, state, tuple(actual.shape)))

    def begin_step(self, step: int) -> None:
        """Do nothing: steps are told apart by what is observed."""

    def entries(self) -> Iterator[Entry]:
        """Yield one entry a piece, in the order of observation."""
        if not self._pending:
            return
        rows = self._differences.rows().tolist()
        bits = self._bits.values().tolist() if self._hash_bits else [0] * len(rows)
        for (step, kind, name, region, state, local_shape), row, hashed in zip(
            self._pending, rows, bits, strict=True
        ):
            difference = Difference.from_statistics(row)
            index = region.global_index(int(difference.position)) if difference.max_error > 0 else ()
            yield Entry(
                step, kind, name, region.key, region.shape, local_shape, state, int(hashed), difference, index
            )
