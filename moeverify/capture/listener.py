"""A listener that knows the model of a script, and this process's place among the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from moeverify.calls.listener import Listener
from moeverify.capture.model import WatchedModel
from moeverify.layout.placement import local_part


class ModelListener(Listener):
    """A listener of a whole script, launched as this rank of this many."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.model = WatchedModel()
        self._launched = rank, world_size

    def find_rank(self) -> tuple[int, int]:
        """Return rank and number of ranks, as torch.distributed has them or else the launcher."""
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return self._launched

    def measure_gradients(self) -> dict[int, float]:
        """Return the norm of each parameter's local gradient, by the id of the parameter."""
        found = [
            (id(shard.tensor), local_part(shard.tensor.grad))
            for shard in self.model.shards()
            if shard.tensor.grad is not None
        ]
        return measure_norms(found)


def measure_norms(found: Sequence[tuple[int, Tensor]]) -> dict[int, float]:
    """Return the 2-norm of each tensor by its key, in float32 at least; waits for the device once per dtype."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
    for key, local in found:
        by_kind.setdefault((local.device, local.dtype), []).append((key, local))
    norms: dict[int, float] = {}
    for (_, dtype), members in by_kind.items():
        # In 16 bits a norm would be rounded to 8 of them, and overflow.
        wide = torch.float32 if dtype.itemsize < 4 else dtype
        values = torch.stack(torch._foreach_norm([local for _, local in members], 2, dtype=wide)).tolist()
        norms.update(zip((key for key, _ in members), values, strict=True))
    return norms
