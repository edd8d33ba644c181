"""What a recording knows of memory: which value lies where, and which collectives may still be using it."""

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
    """What is known of one storage: which value lies where, and the writes that are not covered by later ones."""

    storage: StorageWeakRef
    epoch: int = 0
    entries: dict[tuple[Geometry, torch.dtype], tuple[int, int]] = field(default_factory=dict)
    writes: list[tuple[int, Geometry]] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)


@dataclass
class Pending:
    """Results of a collective that are in memory only when it is waited for."""

    values: list[int]
    tensors: list[Tensor]
    use: Use
