"""Regions: the part of a logical tensor that a rank stores, as global indices."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

Indices = range | tuple[int, ...]


def as_indices(indices: Sequence[int]) -> Indices:
    """Return the indices as a range of step 1 where possible, else as a tuple."""
    if isinstance(indices, range) and indices.step == 1:
        return indices
    values = tuple(indices)
    if values and values == tuple(range(values[0], values[0] + len(values))):
        return range(values[0], values[0] + len(values))
    return values


@dataclass(frozen=True)
class Region:
    """A part of a logical tensor of the given global shape.

    A region is either a box or a flat range. A box lists the global indices of every dim, in the order of
    the local tensor. A flat range (`flat`) indexes the row-major flattened tensor, as FSDP1 shards.

    Example: rank 1 of 2 of a tensor (8, 4) under Shard(0) has `Region.box((8, 4), [range(4, 8),
    range(4)])`.
    """

    shape: tuple[int, ...]
    dims: tuple[Indices, ...]
    flat: range | None = None

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """Return the region of a whole tensor."""
        return cls(tuple(shape), tuple(range(size) for size in shape))

    @classmethod
    def box(cls, shape: Sequence[int], dims: Sequence[Sequence[int]]) -> Region:
        """Return the region with the given indices of every dim."""
        return cls(tuple(shape), tuple(as_indices(indices) for indices in dims))

    @classmethod
    def run(cls, shape: Sequence[int], start: int, stop: int) -> Region:
        """Return the region of elements [start, stop) of the flattened tensor."""
        return cls(tuple(shape), (), range(start, stop))

    # Cached: a step reads them several times per shard, on the host, which the GPU waits for.
    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """Return the shape of the local tensor of this region."""
        if self.flat is not None:
            return (len(self.flat),)
        return tuple(len(indices) for indices in self.dims)

    @cached_property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.local_shape)

    @property
    def is_whole(self) -> bool:
        """Return whether the region contains every element of the logical tensor, in its own order."""
        return self == Region.whole(self.shape) or (
            self.flat is not None and self.flat == range(math.prod(self.shape))
        )

    @cached_property
    def key(self) -> str:
        """Return a short text that identifies the region (up to a collision of a 64-bit hash)."""
        if self.flat is not None:
            return f"flat {self.flat.start}:{self.flat.stop}"
        return ",".join(_describe(indices) for indices in self.dims)

    def take(self, tensor: Tensor) -> Tensor:
        """Return this region (`local_shape`) of a whole logical tensor; a view where every dim is contiguous."""
        if self.flat is not None:
            return tensor.reshape(-1)[self.flat.start : self.flat.stop]
        for dim, indices in enumerate(self.dims):
            if isinstance(indices, range):
                tensor = tensor.narrow(dim, indices.start, len(indices))
            else:
                chosen = torch.tensor(indices, dtype=torch.int64, device=tensor.device)
                tensor = tensor.index_select(dim, chosen)
        return tensor

    def put(self, whole: Tensor, local: Tensor) -> None:
        """Write the local tensor, of shape `local_shape`, into the whole logical tensor, in place."""
        if self.flat is not None:
            whole.reshape(-1)[self.flat.start : self.flat.stop] = local.reshape(-1)
            return
        if not self.dims:
            whole.copy_(local)
            return
        along = [
            torch.tensor(tuple(indices), dtype=torch.int64, device=whole.device) for indices in self.dims
        ]
        # Indices of a dim may have gaps (zigzag), so slices do not suffice.
        grid = torch.meshgrid(*along, indexing="ij")
        whole[grid] = local.to(whole.dtype)

    def flat_index(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the row-major global index of every element. Shape: `local_shape`, int64.

        Example: `Region.box((4, 3), [range(2, 4), range(1, 3)])` has [[7, 8], [10, 11]].
        """
        if self.flat is not None:
            return torch.arange(self.flat.start, self.flat.stop, device=device)
        total = torch.zeros((), dtype=torch.int64, device=device)
        stride = math.prod(self.shape)
        for dim, indices in enumerate(self.dims):
            stride //= max(self.shape[dim], 1)
            if isinstance(indices, range):
                along = torch.arange(indices.start, indices.stop, device=device)
            else:
                along = torch.tensor(indices, dtype=torch.int64, device=device)
            view = [1] * len(self.dims)
            view[dim] = -1
            total = total + along.view(view) * stride
        return total

    def global_index(self, position: int) -> tuple[int, ...]:
        """Return the global index of the element at a row-major position of the local tensor."""
        if self.flat is not None:
            return _unravel(self.flat[position], self.shape)
        local = _unravel(position, self.local_shape)
        return tuple(indices[i] for indices, i in zip(self.dims, local, strict=True))


def _unravel(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    found: list[int] = []
    for size in reversed(shape):
        position, index = divmod(position, max(size, 1))
        found.append(index)
    return tuple(reversed(found))


def _describe(indices: Indices) -> str:
    if isinstance(indices, range):
        return f"{indices.start}:{indices.stop}"
    if len(indices) <= 16:
        return "+".join(map(str, indices))
    return "#" + hashlib.sha256(repr(indices).encode()).hexdigest()[:16]
