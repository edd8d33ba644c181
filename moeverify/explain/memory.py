"""State of memory during a recording: the values it holds and the collectives that may still use it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from moeverify.explain.program import Geometry


@dataclass
class Use:
    """A collective that may still be using memory."""

    op: int
    writes: bool
    work: Any
    is_direct: bool


@dataclass
class Memory:
    """State of one storage: the value at each place, and writes not fully overwritten since."""

    storage: StorageWeakRef
    epoch: int = 0
    entries: dict[tuple[Geometry, torch.dtype], tuple[int, int]] = field(default_factory=dict)
    writes: list[tuple[int, Geometry]] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)


@dataclass
class Pending:
    """Results of a collective, which are in memory only after the program waits for it."""

    values: list[int]
    tensors: list[Tensor]
    use: Use
