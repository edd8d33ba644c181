"""Every rank gathers all keys and values and attends with its own queries.

Backward: the gradients of keys and values are summed over the ranks and each keeps its own part (reduce-scatter).
Positions are split in zigzag, so that causal attention costs every rank the same.

Source: Llama 3 (arXiv 2407.21783), section 3.3.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeverify.parallel.context_parallel import ContextVariant

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


class AllGatherCore:
    """Attends to the keys and values of all ranks, which are gathered with their positions.

    Letters: B rows, s positions of this rank, S of all ranks, N heads, D width of a head.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        """Return the mixed values (B, s, Nq, Dv) of q, k, v (B, s, N, D); see `moeverify.model.attention.Core`."""
        from moeverify.model.attention import attend
        from moeverify.parallel.collectives import all_gather_sum

        # (B, S, N, D) in rank order. In zigzag that is not the order of the row, so the positions travel too: the
        # causal mask compares positions and not places.
        keys = all_gather_sum(k, 1, self.group)
        values = all_gather_sum(v, 1, self.group)
        key_positions = all_gather_sum(positions, 1, self.group)
        return attend(q, keys, values, positions, key_positions)


class _AllGather(ContextVariant):
    def make_core(self, group: ProcessGroup) -> AllGatherCore:
        return AllGatherCore(group)


IMPLEMENTATION = _AllGather()
