"""Where it began: the first module, forward and backward, whose output differs although its input does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeverify.diagnose.evidence import Piece, Suspect
from moeverify.layout.region import Indices, Region, as_indices
from moeverify.train.module_taps import BACKWARD, FORWARD, Reading

Coordinates = Mapping[int, Mapping[str, int]]
_BOUNDS = {torch.float64: 1e-9, torch.float32: 3e-4}


@dataclass(frozen=True)
class RankReadings:
    """What one rank's tap read, with the rows and positions of each micro-batch."""

    readings: Sequence[Reading]
    shares: Sequence[tuple[Indices, Indices]]


@dataclass(frozen=True)
class Origin:
    """The first reading, in the golden's order, that differs; its suspect has all ranks' pieces."""

    direction: str
    module: str
    end: str
    error: float
    ranks: tuple[int, ...]
    suspect: Suspect
    first_micro_batch: int = 0
    input: Tensor | None = None

    @property
    def name(self) -> str:
        """Return what differs, in words."""
        return f"{'gradient of ' if self.direction == BACKWARD else ''}{self.end} of {self.module}"

    @property
    def culprit(self) -> str:
        """Return the module whose own computation went wrong.

        A wrong input of a module, with everything before it right, was made by the module around it; a wrong
        gradient of an output came from whoever used that output.
        """
        around = self.module.rpartition(".")[0]
        wrong_here = self.end == ("output" if self.direction == FORWARD else "input")
        return self.module if wrong_here else (around or "the model")


@dataclass(frozen=True)
class Search:
    """What came of the search: the origin of each direction, how many readings were right before, how far off.

    `bound` is the relative error above which a reading is wrong.
    """

    origins: Mapping[str, Origin]
    num_right: Mapping[str, int]
    worst_right: Mapping[str, float]
    bound: float


def find_origins(
    golden: Sequence[Reading],
    by_rank: Sequence[RankReadings],
    coordinates: Coordinates,
    tp: int,
    precision: torch.dtype,
) -> Search:
    """Return the origin of each direction in which anything differs by more than the precision's rounding."""
    bound = _BOUNDS[precision]
    origins: dict[str, Origin] = {}
    num_right = dict.fromkeys((FORWARD, BACKWARD), 0)
    worst_right = dict.fromkeys((FORWARD, BACKWARD), 0.0)
    for reading in sorted(golden, key=lambda reading: reading.order):
        if reading.direction in origins:
            continue
        suspect = _gather(reading, by_rank, coordinates, tp)
        if suspect is None:
            continue
        errors = {piece.rank: _error(piece, suspect.expected) for piece in suspect.pieces}
        worst = max(errors.values(), default=0.0)
        if worst <= bound:
            num_right[reading.direction] += 1
            worst_right[reading.direction] = max(worst_right[reading.direction], worst)
        else:
            ranks = tuple(sorted(rank for rank, error in errors.items() if error > bound))
            suspect.precision = precision
            origins[reading.direction] = Origin(
                reading.direction,
                reading.module,
                reading.end,
                worst,
                ranks,
                suspect,
                min(_micro_batches(suspect, by_rank, bound)),
                _input_of(golden, reading),
            )
    return Search(origins, num_right, worst_right, bound)


def _input_of(golden: Sequence[Reading], reading: Reading) -> Tensor | None:
    """Return what one device read at the input of the module, forward."""
    return next(
        (
            other.local
            for other in golden
            if (other.direction, other.module, other.end) == (FORWARD, reading.module, "input")
        ),
        None,
    )


def _micro_batches(suspect: Suspect, by_rank: Sequence[RankReadings], bound: float) -> list[int]:
    """Return the micro-batches in which some rank is wrong."""
    wrong: list[int] = []
    for piece in suspect.pieces:
        if _error(piece, suspect.expected) > bound:
            rows = [as_indices(rows) for rows, _ in by_rank[piece.rank].shares]
            wrong.append(rows.index(piece.region.dims[0]))
    return wrong


def _gather(
    golden: Reading, by_rank: Sequence[RankReadings], coordinates: Coordinates, tp: int
) -> Suspect | None:
    kind = f"{'gradient of ' if golden.direction == BACKWARD else ''}{golden.end}"
    suspect = Suspect((0, kind, golden.module), golden.local.to(torch.float64))
    for rank, read in enumerate(by_rank):
        for reading in read.readings:
            same = (reading.direction, reading.module, reading.end)
            if same != (golden.direction, golden.module, golden.end):
                continue
            rows, positions = read.shares[reading.micro_batch]
            place = coordinates.get(rank, {}).get("tp", 0)
            region = _region(suspect.expected, reading.local, rows, positions, (place, tp))
            if region is not None:
                suspect.pieces.append(Piece(rank, region, reading.local))
    return suspect if suspect.pieces else None


def _region(
    expected: Tensor, local: Tensor, rows: Indices, positions: Indices, place: tuple[int, int]
) -> Region | None:
    """Return which part of the golden's tensor a rank read; tp may have cut positions or the last dims."""
    rank, size = place
    if local.ndim != expected.ndim or local.shape[0] != len(rows):
        return None
    dims: list[Sequence[int]] = [rows]
    if local.shape[1] == len(positions):
        dims.append(positions)
    elif local.shape[1] * size == len(positions):
        dims.append(positions[rank * local.shape[1] : (rank + 1) * local.shape[1]])
    else:
        return None
    for dim in range(2, local.ndim):
        whole, held = expected.shape[dim], local.shape[dim]
        if held == whole:
            dims.append(range(whole))
        elif held * size == whole:
            dims.append(range(rank * held, (rank + 1) * held))
        else:
            return None
    return Region(tuple(expected.shape), tuple(as_indices(indices) for indices in dims))


def _error(piece: Piece, expected: Tensor) -> float:
    assert piece.local is not None
    wanted = piece.region.take(expected)
    found = piece.local.to(torch.float64)
    scale = float(wanted.norm()) or float(expected.norm())
    difference = float((found - wanted).norm())
    if not torch.isfinite(found).all():
        return float("inf")
    return difference / scale if scale else difference
