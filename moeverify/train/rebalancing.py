"""Expert placements computed during training from the load that the routers of all ranks have counted so far.

Letters: T steps, L MoE layers, E experts, n ranks of ep.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moeverify.seams import seam
from moeverify.tools.placement.placement import Placement
from moeverify.tools.placement.policy import Policy
from moeverify.train.routers import RouterView

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def count_copies(routers: Sequence[RouterView]) -> Iterator[tuple[int, Tensor]]:
    """Yield (layer, token copies per expert (E) int64) for the routers' micro-batch, including padding."""
    for router in routers:
        found, record = _LAYER.search(router.name), router.module.record
        if found is not None and record is not None:
            yield (
                int(found[1]),
                torch.bincount(record.ids.flatten(), minlength=router.module.spec.num_experts),
            )


class Rebalancing:
    """A counter of this rank's load that computes a new placement when the policy asks for one.

    `source` is the ep coordinate from which this rank sends token copies. It is None for a rank that routes
    the same tokens as another one. Counts stay on the device until `solve` needs them, so a step does not
    synchronize.
    """

    def __init__(self, policy: Policy, first: Placement, source: int | None) -> None:
        self._policy = policy
        self._current = first
        self._source = source
        self._now: dict[int, Tensor] = {}
        self._steps: list[dict[int, Tensor]] = []

    def count(self, routers: Sequence[RouterView]) -> None:
        """Count the micro-batch that this rank's routers hold."""
        if self._source is None:
            return
        for layer, counts in count_copies(routers):
            self._now[layer] = self._now[layer] + counts if layer in self._now else counts

    def end_step(self) -> None:
        """Store the counts of a step, for as long as the policy uses them."""
        self._steps.append(self._now)
        self._now = {}
        if self._policy.last is not None:
            self._steps = self._steps[-self._policy.last :]

    @seam
    def solve(self, step: int) -> Placement | None:
        """Return the placement after `step` steps, equal on all ranks; None to keep the current one.

        Rank 0 solves for the counts summed over all ranks. Collective: all ranks of the layout.
        """
        if step % self._policy.every:
            return None
        copies = self.sum_copies()
        answer: list[Any] = [None]
        if dist.get_rank() == 0:
            answer = [self._policy.solve(copies.cpu().numpy(), self._current)]
        dist.broadcast_object_list(answer)
        self._current = answer[0]
        return self._current

    def sum_copies(self) -> Tensor:
        """Return the token copies of the stored steps (T, L, E, n) int64. Collective: all ranks."""
        first = self._current
        shape = (len(self._steps), len(first.layers), first.num_experts, first.num_ranks)
        device = next((counts.device for step in self._steps for counts in step.values()), None)
        copies = torch.zeros(shape, dtype=torch.int64, device=device or _find_device())
        for position, step in enumerate(self._steps):
            for layer, counts in step.items():
                # Only one rank counts each token copy: the others have no `source`, and no counts.
                copies[position, first.layers.index(layer), :, self._source] = counts
        dist.all_reduce(copies)
        return copies


def _find_device() -> torch.device:
    """Return the device of the default process group's reductions."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
