"""Every rank gathers all keys and values and attends with its own queries.

Backward: the gradients of keys and values are reduce-scattered. Positions are split in zigzag, so that
causal attention costs the same on every rank.

Source: Llama 3 (arXiv 2407.21783), section 3.3.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeverify.parallel.context_parallel import ContextVariant

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


class AllGatherCore:
    """Attention core that all-gathers keys, values and their positions.

    Notation: B rows, s positions of this rank, S positions of all ranks, N heads, D head width.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        """Return the mixed values; see `moeverify.model.attention.Core`.

        Shapes: q, k, v (B, s, N, D), positions (B, s); returns (B, s, Nq, Dv).
        """
        from moeverify.model.attention import attend
        from moeverify.parallel.collectives import all_gather_sum

        # (B, S, N, D) in rank order. Under the zigzag split this is not the order of the sequence, so the
        # positions are gathered too. The causal mask compares positions, not indices.
        keys = all_gather_sum(k, 1, self.group)
        values = all_gather_sum(v, 1, self.group)
        key_positions = all_gather_sum(positions, 1, self.group)
        return attend(q, keys, values, positions, key_positions)


class _AllGather(ContextVariant):
    def make_core(self, group: ProcessGroup) -> AllGatherCore:
        return AllGatherCore(group)


IMPLEMENTATION = _AllGather()
