"""Bringing each token to its experts and their outputs back, on one device.

Letters: N tokens, k choices, M = N * k token copies, E experts, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moeverify.model.precision import widen

ExpertFunction = Callable[[Tensor, Tensor], Tensor]
"""x (M, H) sorted by expert and counts (E) int64 in; outputs (M, H) out."""


class Dispatcher(Protocol):
    """Runs the experts on the tokens that chose them."""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertFunction) -> Tensor:
        """Return the weighted sum (N, H) of the chosen experts' outputs.

        Shapes: x (N, H), ids and weights (N, k).
        """
        ...


class SortedCopies(NamedTuple):
    """Token copies sorted by expert, and within an expert by token and then choice.

    x (M, H); counts (E) int64, how many copies each expert gets; order (M) int64, which copy
    (token * k + choice) stands at each place.
    """

    x: Tensor
    counts: Tensor
    order: Tensor


def permute(x: Tensor, ids: Tensor, num_experts: int) -> SortedCopies:
    """Return the k copies of each token of x (N, H) sorted by expert ids (N, k)."""
    sorted_ids, order = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(sorted_ids, torch.arange(num_experts, device=ids.device), right=True)
    counts = ends.diff(prepend=ends.new_zeros(1))
    # Copy first, then permute: the backward is then a permutation and a sum over k, in a fixed order on every
    # device, where that of an index with repeated tokens would use atomics.
    copies = x.unsqueeze(1).expand(-1, ids.shape[1], -1).flatten(0, 1)
    return SortedCopies(copies.index_select(0, order), counts, order)


def unpermute(y: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Return the sum over k of weight times output, taken in at least float32.

    Shapes: y (M, H) in the `order` (M) that `permute` gave, weights (N, k); returns (N, H).
    """
    places = torch.arange(len(order), device=order.device)
    inverse = torch.empty_like(order).scatter(0, order, places)
    outputs = y.index_select(0, inverse).view(*weights.shape, y.shape[-1])
    wide = widen(y.dtype)
    combined = (outputs.to(wide) * weights.to(wide).unsqueeze(-1)).sum(dim=1)
    return combined.to(y.dtype)


class LocalDispatcher:
    """The dispatcher of one device, which holds all `num_experts` experts; dropless."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertFunction) -> Tensor:
        """Return the weighted sum (N, H) of the chosen experts' outputs.

        Shapes: x (N, H), ids and weights (N, k).
        """
        copies = permute(x, ids, self.num_experts)
        return unpermute(experts(copies.x, copies.counts), copies.order, weights)
