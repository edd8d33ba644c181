"""Optimizers that reduce gradients over ranks within their own step, as those of ZeRO do."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.parallel.regions.placement import local_part
from moeverify.verification.launch.watched_rank import find_trace

_REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")


class StepReductions:
    """The reductions that an optimizer issues from `begin` to `end`."""

    def __init__(self) -> None:
        self._since = 0
        self._numel = 0

    def begin(self, shards: Sequence[LocalShard]) -> None:
        """Begin an optimizer step on these parameters."""
        trace = find_trace()
        gradients = [shard.tensor.grad for shard in shards if shard.tensor.grad is not None]
        self._numel = sum(local_part(gradient).numel() for gradient in gradients)
        self._since = trace.num_collectives if trace is not None else 0

    def end(self) -> str | None:
        """Return the file:line of the first reduction, or None if they have fewer elements than the gradients.

        Optimizers also reduce numbers, such as a norm or a flag for infinite gradients.
        """
        trace = find_trace()
        records = trace.since(self._since) if trace is not None and self._numel else []
        found = [each for each in records if len(each.group) > 1 and each.op.startswith(_REDUCTIONS)]
        if not found or sum(each.num_tensors * math.prod(each.shape) for each in found) < self._numel:
            return None
        place = found[0].site.split(" in ")[0]
        return place.rpartition("/")[2]
