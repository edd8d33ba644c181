"""Which copies of its tokens each rank gets nothing back for, as short as it can be said: all but the first ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from moeverify.diagnose.routed.exchange import Call
from moeverify.results.layout import CopyOrder, LostCopies, LostWay

_LEAST = 8
"""Copies of a rank, of fewer any are the first or the last ones."""


def find_lost(calls: Sequence[Call], ids: Tensor, lost: Tensor) -> LostCopies | None:
    """Return which copies (N, k) of all ranks are lost, by one rule and one number; None where none says it.

    `ids` (N, k) are their experts. Copies stand in the order of tokens, each with its choices, or sorted by expert.
    """
    choices = ids.shape[1]
    senders = [tokens for call in calls for tokens in call if len(tokens)]
    if not senders or any(len(tokens) * choices < _LEAST for tokens in senders):
        return None
    if bool(lost.all()):
        return LostCopies(way="all")
    overwritten = _find_overwritten(ids, lost)
    if overwritten is not None:
        return overwritten
    for order in _ORDERS:
        parts = [_sort(tokens, ids, lost, order) for tokens in senders]
        for way, count in _WAYS.items():
            numbers = {count(part) for part in parts}
            number = min(numbers)
            if len(numbers) == 1 and number > 0:
                return LostCopies(way=way, number=number, order=order)
    return None


def _find_overwritten(ids: Tensor, lost: Tensor) -> LostCopies | None:
    """Return which one of each token's copies (N, k) is left, where that is the first or the last one of all."""
    if ids.shape[1] < 2:
        return None
    for order in _ORDERS:
        places = ids.argsort(dim=1).argsort(dim=1) if order == "experts" else torch.arange(ids.shape[1])
        if bool((lost == (places < ids.shape[1] - 1)).all()):
            return LostCopies(way="all-but-last-of-token", order=order)
        if bool((lost == (places > 0)).all()):
            return LostCopies(way="all-but-first-of-token", order=order)
    return None


def _sort(tokens: Tensor, ids: Tensor, lost: Tensor, order: CopyOrder) -> Tensor:
    """Return of the copies (M) of a rank's tokens which are lost, in an order."""
    experts, found = ids[tokens].flatten(), lost[tokens].flatten()
    return found if order == "tokens" else found[experts.argsort(stable=True)]


def _count_first(lost: Tensor) -> int:
    """Return how many copies are lost, if these are the first ones; else 0."""
    number = int(lost.sum())
    return number if bool(lost[:number].all()) else 0


_ORDERS: Sequence[CopyOrder] = ("tokens", "experts")
_WAYS: Mapping[LostWay, Callable[[Tensor], int]] = {
    "all-but-first": lambda lost: _count_first(~lost),
    "all-but-last": lambda lost: _count_first(~lost.flip(0)),
    "first": _count_first,
    "last": lambda lost: _count_first(lost.flip(0)),
}
