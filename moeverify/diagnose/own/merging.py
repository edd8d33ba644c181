"""How the ranks of a context group merge what queries see of each rank's keys, with a part of it otherwise.

Each chunk of keys gives a sum of values and a denominator, both relative to a largest score. What came before is
rescaled to the largest score so far, and at the end the sum is divided by the denominator.

Letters: b rows, N heads, s queries, S keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

SOFTMAXES: Mapping[str, tuple[str, str]] = {
    "mean-of-chunks": ("own", "chunks"),
    "sum-of-chunks": ("own", "chunks"),
    **{
        f"{largest}-{what}": (largest, what)
        for what in ("both", "numerator", "denominator")
        for largest in ("own", "ring", "order")
    },
}
"""How chunks are merged: relative to which largest score each is taken, and what is not rescaled."""

STEPS: Mapping[str, tuple[str, str]] = {
    "undivided": ("end", "undivided"),
    "divided-twice": ("end", "divided-twice"),
    # Below, the last chunk alone is no step: it may have no key that a query sees, and nothing finite comes out.
    "numerator-last": ("numerator", "last"),
    **{
        f"{what}-{how}": (what, how) for how in ("first", "opposite") for what in ("numerator", "denominator")
    },
    "denominator-factor": ("denominator", "factor"),
    "both-opposite": ("both", "opposite"),
    "denominator-mean": ("denominator", "mean"),
}
"""What else of the loop over chunks may be otherwise: which sum is kept, and by what that of before is multiplied."""


def merge_softmaxes(masked: Tensor, owner: Tensor, key_owner: Tensor, size: int, way: str) -> Tensor:
    """Return the weights (b, N, s, S) where the softmax of each rank's keys is merged with those of others wrongly.

    `masked` are the scores (b, N, s, S), -inf where hidden; `owner` (s, 1) and `key_owner` (S) are the ranks, of
    `size`, that have queries and keys. The largest score that a chunk is taken relative to is its own, or the largest
    so far: over the ring from the query's rank on, or over the ranks in order. Without rescaling it stays so, above,
    below, or both.
    """
    largest, what = SOFTMAXES[way]
    top = masked.amax(-1, keepdim=True)
    weights, above, below = torch.zeros_like(masked), torch.zeros_like(top), torch.zeros_like(top)
    so_far = torch.full_like(top, -torch.inf)
    for number in range(size):
        turn = (owner - number) % size if largest == "ring" else torch.full_like(owner, number)
        part = masked.masked_fill(key_owner != turn, -torch.inf)
        best = part.amax(-1, keepdim=True)
        so_far = torch.maximum(so_far, best)
        against = best if largest not in ("ring", "order") else so_far
        share = (part - _finite(against)).exp()
        total = share.sum(-1, keepdim=True)
        above = above + (total > 0)
        if what == "chunks":
            weights = weights + share / total.clamp(min=1e-300)
            continue
        right = (part - top).exp()
        weights = weights + (right if what == "denominator" else share)
        below = below + (right.sum(-1, keepdim=True) if what == "numerator" else total)
    if way == "sum-of-chunks":
        return weights
    return weights / (above if way == "mean-of-chunks" else below)


def merge_by_steps(masked: Tensor, owner: Tensor, key_owner: Tensor, size: int, way: str) -> Tensor:
    """Return the weights of a query's rank, which meets its own chunk first, where a step of `STEPS` is otherwise.

    Arguments as of `merge_softmaxes`.
    """
    what, how = STEPS[way]
    join = {name: _join(how if what in (name, "both") else "") for name in ("numerator", "denominator")}
    largest = torch.full_like(masked[..., :1], -torch.inf)
    mixed, total = torch.zeros_like(masked), torch.zeros_like(largest)
    for number in range(size):
        part = masked.masked_fill(key_owner != (owner - number) % size, -torch.inf)
        best = torch.maximum(largest, part.amax(-1, keepdim=True))
        share = (part - _finite(best)).exp()
        weight = share.sum(-1, keepdim=True)
        if (what, how) == ("denominator", "mean"):
            weight = weight / int((key_owner == number).sum())
        if number:
            shrink = (_finite(largest) - _finite(best)).exp()
            share = join["numerator"](share, mixed, shrink)
            weight = join["denominator"](weight, total, shrink)
        mixed, largest, total = share, best, weight
    power: int = {"undivided": 0, "divided-twice": 2}.get(how, 1)
    return mixed / total**power


def _join(how: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return what is made of a chunk's sum, the sum before it and the factor that rescales this one."""
    ways: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "last": lambda new, old, shrink: new,
        "first": lambda new, old, shrink: old * shrink,
        "factor": lambda new, old, shrink: new + shrink,
        "opposite": lambda new, old, shrink: new + old / shrink,
    }
    return ways.get(how, lambda new, old, shrink: new + old * shrink)


def _finite(largest: Tensor) -> Tensor:
    """Return the largest scores, zero where a query sees no key."""
    return torch.where(torch.isfinite(largest), largest, torch.zeros_like(largest))
