"""The backward pass of attention that is made block by block, with a part of it otherwise.

With P the weights, dP their gradient and delta the sum of P dP over all keys, the gradient of the scores is
P (dP - delta). Each block computes its part of it again, from the logsumexp and the delta of the merged output.

Letters: s queries, S keys; what stands before is as many dims as there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from moeverify.results.change import Change

PART, KEYS = "blocks-back", "keys-back"
_DELTA, _LSE = "delta-of-block", "lse-of-block"
NO_DELTA = "no-delta"


class _BlockWeights(torch.autograd.Function):
    """A softmax over all keys, whose gradient is computed block by block with what should be of all blocks."""

    @staticmethod
    def forward(ctx: Any, masked: Tensor, turns: Tensor, way: str) -> Tensor:
        weights = masked.softmax(-1).nan_to_num()
        ctx.save_for_backward(weights, turns)
        ctx.way = way
        return weights

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        weights, turns = ctx.saved_tensors
        (gradient,) = gradients
        if ctx.way == NO_DELTA:
            return weights * gradient, None, None
        delta = (weights * gradient).sum(-1, keepdim=True)
        found = torch.zeros_like(weights)
        for turn in range(int(turns.max()) + 1):
            part = weights * (turns == turn)
            own = part / part.sum(-1, keepdim=True).clamp(min=1e-300)
            if ctx.way == _DELTA:
                found = found + part * (gradient - (own * gradient).sum(-1, keepdim=True))
            else:
                found = found + own * (gradient - delta)
        return found, None, None


class _Weighed(torch.autograd.Function):
    """Scores whose gradient counts some keys alone."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, counted: Tensor) -> Tensor:
        ctx.save_for_backward(counted)
        return scores.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (counted,) = ctx.saved_tensors
        return gradients[0] * counted, None


def weigh_back(masked: Tensor, turns: Tensor, change: Change) -> Tensor:
    """Return the softmax of `masked` scores (..., s, S), -inf where hidden, with a backward pass of `list_back`."""
    weights: Tensor = _BlockWeights.apply(masked, turns, change.way)  # type: ignore[no-untyped-call]
    return weights


def count_keys(scores: Tensor, turns: Tensor, change: Change) -> Tensor:
    """Return the scores (..., s, S), of whose gradient some keys alone come to the queries; see `list_keys_back`."""
    counted: Tensor = _Weighed.apply(scores, choose_keys(turns, change).to(scores.dtype))  # type: ignore[no-untyped-call]
    return counted


def choose_keys(turns: Tensor, change: Change) -> Tensor:
    """Return which keys (s, S) count for each query, by the turn in which it meets them."""
    last = int(turns.max())
    ways: Mapping[str, Callable[[], Tensor]] = {
        "own": lambda: turns == 0,
        "not-own": lambda: turns != 0,
        "last": lambda: turns == last,
        "without-turn": lambda: turns != int(change.number or 0),
    }
    return ways[change.way]()


def list_back(num_ranks: int) -> list[Change]:
    """Return what may be of a rank's chunk in the backward pass where it should be of all: delta, or logsumexp."""
    return [Change(part=PART, way=way) for way in (_DELTA, _LSE) if num_ranks > 1]


def list_keys_back(num_ranks: int) -> list[Change]:
    """Return the chunks of keys, of ranks around a ring, that alone count in the gradient of the queries."""
    if num_ranks == 1:
        return []
    ways = ("own", "not-own", "last") if num_ranks > 2 else ("own", "not-own")
    turns = range(1, num_ranks - 1)
    return [
        *(Change(part=KEYS, way=way) for way in ways),
        *(Change(part=KEYS, way="without-turn", number=turn) for turn in turns),
    ]
