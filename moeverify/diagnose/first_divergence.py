"""The first divergence: the first module, forward and backward, whose output differs although its input matches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from moeverify.diagnose.wrong_tensor import MODULE_KINDS, RankShard, WrongTensor
from moeverify.layout.region import Indices, Region, as_indices
from moeverify.results.observation import Direction, End, FirstDivergence
from moeverify.results.trial import Reason, Trial
from moeverify.train.module_taps import BACKWARD, FORWARD, Reading

NAME = "first_divergence"
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")

Coordinates = Mapping[int, Mapping[str, int]]

# Relative errors above which a reading is wrong: a thousand times what reordered sums of a few layers cost. Units of
# rounding are 1.1e-16 and 6e-8. Readings in bfloat16 (4e-3) are not compared: its rounding hides where it began.
_BOUNDS = {torch.float64: 1e-9, torch.float32: 3e-4}


@dataclass(frozen=True)
class RankReadings:
    """What one rank's tap read, with the rows and positions of each micro-batch."""

    readings: Sequence[Reading]
    shares: Sequence[tuple[Indices, Indices]]


@dataclass(frozen=True)
class Origin:
    """The first reading, in the golden's order, that differs; `tensor` has what all ranks read.

    `input` is what one device read at the input of the same module, forward.
    """

    direction: Direction
    module: str
    end: End
    error: float
    ranks: tuple[int, ...]
    tensor: WrongTensor
    first_micro_batch: int = 0
    input: Tensor | None = None

    @property
    def culprit(self) -> str:
        """Return the module whose own computation went wrong, and nothing where that is the whole model.

        A wrong input of a module, with everything before it right, was made by the module around it; a wrong
        gradient of an output came from whoever used that output.
        """
        around = self.module.rpartition(".")[0]
        wrong_here = self.end == ("output" if self.direction == FORWARD else "input")
        return self.module if wrong_here else around


@dataclass(frozen=True)
class Search:
    """What came of the search: the origin of each direction, how many readings were right before, how far off.

    `bound` is the relative error above which a reading is wrong.
    """

    origins: Mapping[str, Origin]
    num_right: Mapping[str, int]
    worst_right: Mapping[str, float]
    bound: float

    def observe(self, direction: Direction) -> FirstDivergence:
        """Return where a direction first differs, and what was right before."""
        num_right, worst_right = self.num_right[direction], self.worst_right[direction]
        origin = self.origins.get(direction)
        if origin is None:
            return FirstDivergence(direction=direction, num_right=num_right, worst_right=worst_right)
        return FirstDivergence(
            direction=direction,
            module=origin.module,
            end=origin.end,
            error=origin.error,
            ranks=origin.ranks,
            num_right=num_right,
            worst_right=worst_right,
        )


def list_search_trials(search: Search | None) -> tuple[Trial, ...]:
    """Return where the modules' outputs and their gradients first differ, as trials."""
    if search is None:
        return (Trial(hypothesis=NAME, verdict="untried", reason=Reason.MODULES_NOT_COMPARED),)
    found = [search.observe(direction) for direction in DIRECTIONS]
    return tuple(
        Trial(
            hypothesis=NAME,
            about=each.direction,
            verdict="no" if each.error is None else "yes",
            observations=(each,),
        )
        for each in found
    )


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
        direction = cast(Direction, reading.direction)
        if direction in origins:
            continue
        tensor = _gather(reading, by_rank, coordinates, tp, precision)
        if tensor is None:
            continue
        errors = _errors_by_rank(tensor)
        worst = max(errors.values())
        if worst <= bound:
            num_right[direction] += 1
            worst_right[direction] = max(worst_right[direction], worst)
        else:
            origins[direction] = Origin(
                direction,
                reading.module,
                cast(End, reading.end),
                worst,
                tuple(sorted(rank for rank, error in errors.items() if error > bound)),
                tensor,
                min(_micro_batches(tensor, by_rank, bound)),
                _input_of(golden, reading),
            )
    return Search(origins, num_right, worst_right, bound)


def _errors_by_rank(tensor: WrongTensor) -> dict[int, float]:
    """Return the largest relative error of each rank over its micro-batches."""
    errors: dict[int, float] = {}
    for shard in tensor.shards:
        errors[shard.rank] = max(errors.get(shard.rank, 0.0), _error(shard, tensor.expected))
    return errors


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


def _micro_batches(tensor: WrongTensor, by_rank: Sequence[RankReadings], bound: float) -> list[int]:
    """Return the micro-batches in which some rank is wrong."""
    wrong: list[int] = []
    for shard in tensor.shards:
        if _error(shard, tensor.expected) > bound:
            rows = [as_indices(rows) for rows, _ in by_rank[shard.rank].shares]
            wrong.append(rows.index(shard.region.dims[0]))
    return wrong


def _gather(
    golden: Reading,
    by_rank: Sequence[RankReadings],
    coordinates: Coordinates,
    tp: int,
    precision: torch.dtype,
) -> WrongTensor | None:
    """Return what all ranks read of one end of a module, over the global batch; None where none read it."""
    expected = golden.local.to(torch.float64)
    if tuple(expected.shape[:2]) != _global_batch(by_rank):
        return (
            None  # rotary embeddings (1, S, D), say: one row for all rows, which is no micro-batch of one row
        )
    shards: list[RankShard] = []
    for rank, read in enumerate(by_rank):
        for reading in read.readings:
            same = (reading.direction, reading.module, reading.end)
            if same != (golden.direction, golden.module, golden.end):
                continue
            rows, positions = read.shares[reading.micro_batch]
            place = coordinates.get(rank, {}).get("tp", 0)
            region = _region(expected, reading.local, rows, positions, (place, tp))
            if region is not None:
                shards.append(RankShard(rank, region, reading.local))
    if not shards:
        return None
    key = (0, MODULE_KINDS[golden.direction], golden.module)
    return WrongTensor(key, expected, tuple(shards), precision)


def _global_batch(by_rank: Sequence[RankReadings]) -> tuple[int, int]:
    """Return rows and positions of the global batch, which all ranks see together."""
    shares = [share for read in by_rank for share in read.shares]
    return max(max(rows) for rows, _ in shares) + 1, max(max(positions) for _, positions in shares) + 1


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
        whole, part = expected.shape[dim], local.shape[dim]
        if part == whole:
            dims.append(range(whole))
        elif part * size == whole:
            dims.append(range(rank * part, (rank + 1) * part))
        else:
            return None
    return Region(tuple(expected.shape), tuple(as_indices(indices) for indices in dims))


def _error(shard: RankShard, expected: Tensor) -> float:
    """Return the error of a shard relative to the golden in its region, or to all of it where that is zero."""
    assert shard.local is not None
    wanted = shard.region.take(expected)
    found = shard.local.to(torch.float64)
    scale = float(wanted.norm()) or float(expected.norm())
    difference = float((found - wanted).norm())
    if not torch.isfinite(found).all():
        return float("inf")
    return difference / scale if scale else difference
