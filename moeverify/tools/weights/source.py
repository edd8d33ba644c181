"""Interfaces for reading and writing weights: sources read any box, sinks write chunks in order."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from moeverify.parallel.regions.region import Indices, Region
from moeverify.tools.weights.tensor_mapping import Ranges, Shape

CHUNK_BYTES = 64 * 2**20
"""Bytes of a tensor in memory at a time, unless one row (for a stack: one expert) is larger."""


@dataclass(frozen=True)
class Spec:
    """The shape and dtype of one tensor."""

    shape: Shape
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Return the size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Chunk:
    """Consecutive indices of dim 0 of the tensor `name`."""

    name: str
    rows: range
    spec: Spec

    @property
    def box(self) -> Ranges:
        """Return the chunk as a box."""
        return (self.rows, *(range(size) for size in self.spec.shape[1:]))

    @property
    def num_bytes(self) -> int:
        """Return the size of the chunk in bytes."""
        return len(self.rows) * math.prod(self.spec.shape[1:]) * self.spec.dtype.itemsize


Read = Callable[[Chunk], Tensor]
"""Returns the values of a chunk, which are valid until the next chunk is read."""


class Buffer:
    """Memory that all chunks are read into, one after the other.

    It is mapped directly, because the allocator's heap would grow with the many chunks of a large model.
    """

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self._memory = mmap.mmap(-1, max((chunk.num_bytes for chunk in chunks), default=0) or 1)

    def place(self, chunk: Chunk) -> Tensor:
        """Return a tensor for a chunk; it invalidates the tensor of the previous chunk."""
        shape = [len(indices) for indices in chunk.box]
        return torch.frombuffer(self._memory, dtype=chunk.spec.dtype, count=math.prod(shape)).view(shape)


class WeightSource(Protocol):
    """Weights that can be read; `num_bytes_read` counts the bytes read from files so far."""

    specs: Mapping[str, Spec]
    num_bytes_read: int

    def read(self, name: str, box: Ranges, out: Tensor) -> Tensor:
        """Fill `out` with the box of the tensor `name`, in its stored dtype, and return it."""
        ...


class Sink(Protocol):
    """A destination for weights."""

    def write(self, chunks: Sequence[Chunk], read: Read) -> None:
        """Write all chunks in order, reading each one with `read` when it is needed."""
        ...


def cut(specs: Mapping[str, Spec]) -> list[Chunk]:
    """Return all tensors split into chunks of about `CHUNK_BYTES`, each at least one row."""
    chunks = []
    for name, spec in specs.items():
        size = spec.shape[0]
        row = max(math.prod(spec.shape[1:]) * spec.dtype.itemsize, 1)
        step = max(CHUNK_BYTES // row, 1)
        chunks += [Chunk(name, range(at, min(at + step, size)), spec) for at in range(0, size, step)]
    return chunks


def read_region(source: WeightSource, name: str, region: Region) -> Tensor:
    """Return a region of the tensor `name`, in the region's local shape, reading little else of the files."""
    dtype = source.specs[name].dtype
    if region.flat is not None:
        return _read_run(source, name, region)
    local = torch.empty(region.local_shape, dtype=dtype)
    for box, target in _cut_region(region):
        source.read(name, box, local[target])
    return local


def _read_run(source: WeightSource, name: str, region: Region) -> Tensor:
    """Read the rows that a range of the flattened tensor touches, and return the range."""
    assert region.flat is not None
    run = region.flat
    if not run:
        return torch.empty(0, dtype=source.specs[name].dtype)
    row = math.prod(region.shape[1:])
    first, last = run.start // row, (run.stop - 1) // row
    box = (range(first, last + 1), *(range(size) for size in region.shape[1:]))
    rows = torch.empty([len(indices) for indices in box], dtype=source.specs[name].dtype)
    return source.read(name, box, rows).flatten()[run.start - first * row : run.stop - first * row]


def _cut_region(region: Region) -> Iterator[tuple[Ranges, tuple[slice, ...]]]:
    """Yield the boxes of consecutive indices in a region, each with its slices of the local tensor."""
    parts: list[tuple[Ranges, tuple[slice, ...]]] = [((), ())]
    for indices in region.dims:
        runs = list(_find_runs(indices))
        parts = [((*box, run), (*target, at)) for box, target in parts for run, at in runs]
    yield from parts


def _find_runs(indices: Indices) -> Iterator[tuple[range, slice]]:
    numbered = enumerate(indices)
    for _, group in groupby(numbered, key=lambda pair: pair[1] - pair[0]):
        run = list(group)
        (start, first), (stop, last) = run[0], run[-1]
        yield range(first, last + 1), slice(start, stop + 1)
