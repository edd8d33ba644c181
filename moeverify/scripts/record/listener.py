"""A listener that knows a script's model and this process's rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moeverify.parallel.regions.placement import local_part
from moeverify.scripts.record.model import WatchedModel
from moeverify.train.calls.listener import Listener


class ModelListener(Listener):
    """A listener for a whole script; `rank` and `world_size` come from the launcher."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.model = WatchedModel()
        self.scaler: object = None  # the gradient scaler that was used last
        self._launched = rank, world_size

    def note_call(self, label: str, owner: object = None) -> None:
        """Store the gradient scaler of a call; see `Listener`."""
        self.scaler = owner if label.startswith("scaler") else self.scaler

    def find_rank(self) -> tuple[int, int]:
        """Return rank and number of ranks from torch.distributed, or else from the launcher."""
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return self._launched

    def measure_gradients(self) -> dict[int, float]:
        """Return the norm of each parameter's local gradient by the parameter's id."""
        found = [
            (id(shard.tensor), local_part(shard.tensor.grad))
            for shard in self.model.shards()
            if shard.tensor.grad is not None
        ]
        return measure_norms(found)


def list_parameters(given: Any) -> list[Tensor]:
    """Return the parameters in the argument of a clip: a module, a tensor, or a sequence of tensors."""
    if isinstance(given, nn.Module):
        return list(given.parameters())
    return [given] if isinstance(given, Tensor) else list(given or ())


def identify(given: Any) -> int:
    """Return a number for the parameters of a clip that other parameters of this process do not have."""
    return hash(frozenset(map(id, list_parameters(given))))


def measure_norms(found: Sequence[tuple[int, Tensor]]) -> dict[int, float]:
    """Return the 2-norm of each tensor by key, in float32 or wider; synchronizes once per dtype."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
    for key, local in found:
        by_kind.setdefault((local.device, local.dtype), []).append((key, local))
    norms: dict[int, float] = {}
    for (_, dtype), members in by_kind.items():
        # A 16-bit norm has only 8 (bfloat16) or 11 (float16) significant bits and may overflow.
        wide = torch.float32 if dtype.itemsize < 4 else dtype
        values = torch.stack(torch._foreach_norm([local for _, local in members], 2, dtype=wide)).tolist()
        norms.update(zip((key for key, _ in members), values, strict=True))
    return norms
