"""State of memory during a recording: the values it holds and the collectives that may still use it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from moeverify.explain.program import Geometry


@dataclass(frozen=True)
class Use:
    """A collective that may still be using memory: one of its tensors, with the bytes of an element."""

    op: int
    writes: bool
    work: Any
    is_direct: bool
    place: Geometry
    size: int

    def overlaps(self, place: Geometry, size: int) -> bool:
        """Return whether an element at `place`, of `size` bytes, shares memory with this tensor."""
        ours, theirs = self.place.extent, place.extent
        if ours.stop * self.size <= theirs.start * size or theirs.stop * size <= ours.start * self.size:
            return False
        if size != self.size:
            return True
        seen = torch.zeros(max(ours.stop, theirs.stop), dtype=torch.bool)
        seen.as_strided(self.place.shape, self.place.stride, self.place.offset).fill_(True)
        return bool(seen.as_strided(place.shape, place.stride, place.offset).any())


@dataclass
class Memory:
    """State of one storage: the value at each place, and writes not fully overwritten since."""

    storage: StorageWeakRef
    epoch: int = 0
    entries: dict[tuple[Geometry, torch.dtype], tuple[int, int]] = field(default_factory=dict)
    writes: list[tuple[int, Geometry]] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)

    def take_raced(self, place: Geometry, size: int, kind: str) -> list[Use]:
        """Remove and return the uses with which a read or write of elements of `size` bytes races."""
        raced = [use for use in self.uses if (kind == "write" or use.writes) and use.overlaps(place, size)]
        self.uses = [use for use in self.uses if use not in raced]
        return raced


@dataclass
class Pending:
    """Results of a collective, which are in memory only after the program waits for it."""

    values: list[int]
    tensors: list[Tensor]
    op: int
    work: Any
