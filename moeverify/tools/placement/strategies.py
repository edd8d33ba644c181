"""Named placements that need no trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from moeverify.tools.placement.placement import Placement, place_in_blocks


def place_striped(num_experts: int, num_ranks: int, layers: Sequence[int]) -> Placement:
    """Return the placement of expert e on rank e mod R.

    With more ranks than experts, rank r holds expert r mod E.
    """
    count = max(num_experts, num_ranks)
    matrix = tuple(
        tuple(index % num_experts for index in range(rank, count, num_ranks)) for rank in range(num_ranks)
    )
    return Placement(num_experts, (matrix,) * len(layers), tuple(layers))


def place_everywhere(num_experts: int, num_ranks: int, layers: Sequence[int]) -> Placement:
    """Return the placement of every expert on every rank, so that no token leaves its rank."""
    matrix = (tuple(range(num_experts)),) * num_ranks
    return Placement(num_experts, (matrix,) * len(layers), tuple(layers))


STRATEGIES: Mapping[str, Callable[[int, int, Sequence[int]], Placement]] = {
    "blocks": place_in_blocks,
    "striped": place_striped,
    "everywhere": place_everywhere,
}
"""By the name in `layout.placement`: functions of (num_experts, num_ranks, indices of MoE layers)."""
