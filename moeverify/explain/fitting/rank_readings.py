"""Readings of all ranks at module ends, assembled to the tensors of the single-device reference."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moeverify.explain.fitting.wrong_tensor import MODULE_KINDS, RankShard, WrongTensor
from moeverify.parallel.regions.region import Indices, Region, as_indices
from moeverify.train.module_taps import BACKWARD, FORWARD, Reading

Coordinates = Mapping[int, Mapping[str, int]]


@dataclass(frozen=True)
class RankReadings:
    """Readings of one rank's tap, with the rows and positions of each micro-batch; empty if unknown.

    `silent` has (module, end, slot, micro-batch) of tensors that were read forward and received no
    gradient.
    """

    readings: Sequence[Reading]
    shares: Sequence[tuple[Indices, Indices]]
    silent: Collection[tuple[str, str, str, int]] = ()


_Read = tuple[int, Reading, tuple[Indices, Indices]]
"""A rank, its reading, and the rows and positions of that micro-batch."""

_Located = tuple[int, Reading, Region, Tensor]
"""A rank, its reading, the region of the whole tensor, and the local values there."""


class AllReadings:
    """Readings of all ranks, indexed by module end."""

    def __init__(
        self,
        by_rank: Sequence[RankReadings],
        coordinates: Coordinates,
        tp: int,
        precision: torch.dtype,
    ) -> None:
        self._places = {rank: place.get("tp", 0) for rank, place in coordinates.items()}
        self._tp = tp
        self._precision = precision
        self._batch = _global_batch(by_rank)
        # Large models have thousands of readings on each side: index them instead of searching.
        self._read: dict[tuple[str, str, str, str], list[_Read]] = {}
        for rank, read in enumerate(by_rank):
            for reading in read.readings:
                self._add(rank, reading, read)
        for rank, read in enumerate(by_rank):
            for reading in _list_silent(read):
                self._add(rank, reading, read)

    def _add(self, rank: int, reading: Reading, read: RankReadings) -> None:
        if reading.micro_batch >= len(read.shares):
            return  # an extra pass without a micro-batch, such as validation
        found = (rank, reading, read.shares[reading.micro_batch])
        self._read.setdefault(_end_of(reading), []).append(found)

    def gather(self, golden: Reading) -> tuple[WrongTensor, list[int], int] | None:
        """Assemble a tensor of all ranks over the global batch.

        Return the tensor, the micro-batch of each shard, and the smallest order. Return None if no rank
        read it.
        """
        expected = golden.local.to(torch.float64)
        parts = list(self._locate(golden, expected, self._read.get(_end_of(golden), [])))
        if not parts:
            return None
        key = (0, MODULE_KINDS[golden.direction], golden.module)
        shards = tuple(RankShard(rank, region, local) for rank, _, region, local in parts)
        readings = [reading for _, reading, _, _ in parts]
        tensor = WrongTensor(key, expected, shards, self._precision)
        return tensor, [each.micro_batch for each in readings], min(each.order for each in readings)

    def _locate(self, golden: Reading, expected: Tensor, read: Sequence[_Read]) -> Iterator[_Located]:
        """Yield the readings of batch tokens, with their regions."""
        # Every micro-batch reads a tensor that is common to all rows, but only a part of its gradient.
        is_one_for_all = expected.shape[0] == 1 < self._batch[0] and golden.direction == FORWARD
        if tuple(expected.shape[:2]) != self._batch and not (
            is_one_for_all and expected.shape[1] == self._batch[1]
        ):
            return
        for rank, reading, (rows, positions) in read:
            place = (self._places.get(rank, 0), self._tp)
            region = locate_tokens(expected, reading.local, rows, positions, place)
            if region is not None:
                yield rank, reading, region, reading.local


def _list_silent(read: RankReadings) -> Iterator[Reading]:
    """Yield zeros for missing gradients of module inputs whose outputs received a gradient.

    The graph is cut inside such a module.
    """
    entered = {
        (reading.module, reading.micro_batch)
        for reading in read.readings
        if (reading.direction, reading.end) == (BACKWARD, "output")
    }
    for reading in read.readings:
        is_input = (reading.direction, reading.end) == (FORWARD, "input")
        key = (reading.module, reading.end, reading.slot, reading.micro_batch)
        if is_input and key in read.silent and (reading.module, reading.micro_batch) in entered:
            yield replace(reading, direction=BACKWARD, order=_LAST, local=torch.zeros_like(reading.local))


_LAST = 1 << 62  # gradients that never arrived sort after all others


def _end_of(reading: Reading) -> tuple[str, str, str, str]:
    return reading.direction, reading.module, reading.end, reading.slot


def _global_batch(by_rank: Sequence[RankReadings]) -> tuple[int, int]:
    """Return the number of rows and positions of the global batch, over all ranks."""
    shares = [share for read in by_rank for share in read.shares]
    num_rows = max((max(rows) for rows, _ in shares), default=-1) + 1
    return num_rows, max((max(positions) for _, positions in shares), default=-1) + 1


def locate_tokens(
    expected: Tensor, local: Tensor, rows: Indices, positions: Indices, place: tuple[int, int]
) -> Region | None:
    """Return the region of the golden's tensor that a rank read, or None if the shapes do not fit.

    `place` is (rank, size) of tensor parallelism, which may split positions or trailing dims. A golden
    tensor of one row, such as rotary embeddings (1, S, D), is common to all rows, not a micro-batch of one
    row.
    """
    rank, size = place
    if expected.shape[:1] == (1,):
        rows = range(1)
    if local.ndim != expected.ndim or local.ndim < 2 or local.shape[0] != len(rows):
        return None
    if expected.shape[0] <= max(rows) or expected.shape[1] <= max(positions):
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


def error_of(shard: RankShard, expected: Tensor) -> float:
    """Return the error of a shard, relative to its golden region or, if that is zero, to the whole golden."""
    assert shard.local is not None
    wanted = shard.region.take(expected)
    found = shard.local.to(torch.float64)
    scale = float(wanted.norm()) or float(expected.norm())
    difference = float((found - wanted).norm())
    if not torch.isfinite(found).all():
        return float("inf")
    return difference / scale if scale else difference
