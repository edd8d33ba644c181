"""Dispatch of tokens to their experts and combination of the outputs, on one device.

Letters: N tokens, k choices, M = N * k token copies, E experts, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from moeverify.model.precision import widen
from moeverify.seams import seam

ExpertFunction = Callable[[Tensor, Tensor], Tensor]
"""experts(x (M, H) sorted by expert, counts (E) int64) -> outputs (M, H)."""


class Dispatcher(Protocol):
    """A callable that runs the experts on the tokens that chose them."""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertFunction) -> Tensor:
        """Return the weighted sum (N, H) of the chosen experts' outputs.

        Shapes: x (N, H), ids and weights (N, k).
        """
        ...


class Overlapping:
    """Mixin of a dispatcher that calls `meanwhile`, if set, while tokens travel between ranks."""

    meanwhile: Callable[[], object] | None = None


class SortedCopies(NamedTuple):
    """Token copies sorted by expert, and within an expert by token and then choice.

    x (M, H); counts (E) int64, the number of copies of each expert; order (M) int64, the index of the copy
    (token * k + choice) in each place.
    """

    x: Tensor
    counts: Tensor
    order: Tensor


@seam
def permute(x: Tensor, ids: Tensor, num_experts: int) -> SortedCopies:
    """Return the k copies of each token of x (N, H), sorted by expert ids (N, k)."""
    counts, order = sort_copies(ids, num_experts)
    return SortedCopies(gather_copies(x, order), counts, order)


def sort_copies(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return counts (E) and order (M) of `SortedCopies` for ids (N, k)."""
    sorted_ids, order = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(sorted_ids, torch.arange(num_experts, device=ids.device), right=True)
    return ends.diff(prepend=ends.new_zeros(1)), order


def gather_copies(x: Tensor, order: Tensor) -> Tensor:
    """Return the copies (M, H) of x (N, H) in `order` (M), where M = N * k."""
    copies: Tensor = _GatherCopies.apply(x, order)  # type: ignore[no-untyped-call]
    return copies


def permute_rows(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Return x[order] for a permutation with a known inverse, with a gather in both passes."""
    rows: Tensor = _PermuteRows.apply(x, order, inverse)  # type: ignore[no-untyped-call]
    return rows


def invert(order: Tensor) -> Tensor:
    """Return the inverse of a permutation."""
    places = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter(0, order, places)


@seam
def unpermute(y: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Return the sum over k of weight times output, summed in float32 or wider.

    Shapes: y (M, H) in the `order` (M) from `permute`, weights (N, k).
    Returns: (N, H) in the dtype of y.
    """
    outputs = permute_rows(y, invert(order), order).view(*weights.shape, y.shape[-1])
    wide = widen(y.dtype)
    combined = (outputs.to(wide) * weights.to(wide).unsqueeze(-1)).sum(dim=1)
    return combined.to(y.dtype)


class _GatherCopies(Function):
    """A gather that copies and sorts tokens at once; its backward is a gather and a sum over k.

    The order of every sum is fixed on every device. The backward of plain indexing would use atomics.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        ctx.copies = (len(x), max(len(order) // max(len(x), 1), 1))
        return x.index_select(0, order // ctx.copies[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        by_token = grad.index_select(0, invert(order)).view(*ctx.copies, grad.shape[-1])
        return by_token.sum(dim=1), None


class _PermuteRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class LocalDispatcher:
    """The dropless dispatcher of one device that holds all `num_experts` experts."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertFunction) -> Tensor:
        """Return the weighted sum (N, H) of the chosen experts' outputs.

        Shapes: x (N, H), ids and weights (N, k).
        """
        copies = permute(x, ids, self.num_experts)
        return unpermute(experts(copies.x, copies.counts), copies.order, weights)
