"""What a diagnosis looks at: pieces of the wrong tensors from every rank, and the golden's whole tensors.

Only what is wrong is gathered, and at most `LIMIT` elements of it, so a diagnosis costs the same however large
the model is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moeverify.layout.region import Region

Key = tuple[int, str, str]  # step, kind, name
LIMIT = 1 << 23

# What the golden's value at another time is called.
STEP_BEFORE, INITIAL_VALUE = "value of the step before", "initial value"

EXACT = 1e-8
"""Relative residual under which, in float64, a hypothesis explains a tensor: far above rounding, far below bugs."""


@dataclass(frozen=True)
class Piece:
    """What one rank holds of a logical tensor; `local` is None where it has none although it should."""

    rank: int
    region: Region
    local: Tensor | None


@dataclass
class Suspect:
    """A logical tensor that differs from its golden.

    `expected` is the whole golden, in float64; `precision` the dtype that the recipe asks for.
    """

    key: Key
    expected: Tensor
    precision: torch.dtype = torch.float64
    pieces: list[Piece] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Return the name of the logical tensor."""
        return self.key[2]

    def whole(self) -> Tensor:
        """Return the whole tensor from the lowest rank that holds each part, float64."""
        whole = torch.zeros_like(self.expected)
        for piece in sorted(self.pieces, key=lambda piece: -piece.rank):
            if piece.local is not None and piece.region.numel:
                piece.region.put(whole, piece.local.to(torch.float64).reshape(piece.region.local_shape))
        return whole

    def differs(self) -> bool:
        """Return whether any piece is further from the golden than float64's rounding."""
        for piece in self.pieces:
            wanted = piece.region.take(self.expected).reshape(piece.region.local_shape)
            if piece.local is None or piece.local.shape != wanted.shape:
                return True
            error = (piece.local.to(torch.float64) - wanted).norm()
            if not error <= 1e-11 * self.expected.norm():
                return True
        return False

    def by_region(self) -> dict[str, list[Piece]]:
        """Return the replicas of each region."""
        groups: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            if piece.region.numel:
                groups.setdefault(piece.region.key, []).append(piece)
        return groups


def measure_factor(suspect: Suspect) -> tuple[float | None, float]:
    """Return the k that brings k times the golden nearest, and what is left, as a share of the tensor."""
    expected, actual = suspect.expected.reshape(-1), suspect.whole().reshape(-1)
    square = float(torch.dot(expected, expected))
    if square == 0.0:
        return None, 1.0
    factor = float(torch.dot(expected, actual)) / square
    return factor, float((actual - factor * expected).norm()) / max(float(actual.norm()), 1e-300)


def measure_distance(suspect: Suspect, value: Tensor) -> tuple[float, float]:
    """Return how far the tensor, and how far its golden, is from another value, as shares of that value's norm."""
    wanted = value.to("cpu", torch.float64).reshape(suspect.expected.shape)
    norm = max(float(wanted.norm()), 1e-300)
    return float((suspect.whole() - wanted).norm()) / norm, float((suspect.expected - wanted).norm()) / norm


def is_value(suspect: Suspect, value: Tensor) -> bool:
    """Return whether the tensor is this other value, and its golden is not."""
    if value.numel() != suspect.expected.numel():
        return False
    error, right = measure_distance(suspect, value)
    return error < EXACT <= right


class Capture:
    """An observer that keeps the local values of chosen logical tensors."""

    def __init__(self, wanted: Sequence[Key]) -> None:
        self._wanted = set(wanted)
        self._room = LIMIT
        self.pieces: list[tuple[Key, Region, Tensor | None]] = []

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Keep one piece if it is wanted; see `moeverify.layout.observer.Observer`."""
        key = (step, kind, name)
        if key not in self._wanted or region.numel > self._room:
            return
        self._room -= region.numel
        copy = None if local is None else local.detach().to("cpu", copy=True).reshape(region.local_shape)
        self.pieces.append((key, region, copy))


def collect_suspects(
    gathered: Sequence[Sequence[tuple[Key, Region, Tensor | None]]],
    read: Callable[[Key], Tensor | None],
    precision: torch.dtype,
) -> dict[Key, Suspect]:
    """Return the suspects from every rank's captured pieces; `read` gives the golden's whole tensor."""
    suspects: dict[Key, Suspect] = {}
    for rank, pieces in enumerate(gathered):
        for key, region, local in pieces:
            if key not in suspects:
                expected = read(key)
                if expected is None or expected.numel() > LIMIT:
                    continue
                suspects[key] = Suspect(key, expected.to("cpu", torch.float64), precision)
            suspects[key].pieces.append(Piece(rank, region, local))
    return suspects
