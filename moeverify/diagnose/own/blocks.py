"""Attention of which each query meets its keys block by block, and how what it makes of these is merged.

Of a block there are the softmax over its keys and their logsumexp. The right merge weighs the former by e to the
power of the latter. All of that is linear in the values, so a merge that is otherwise gives these other weights.

Letters: N heads, s queries, S keys; what stands before is as many dims as there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moeverify.results.change import Change

MERGE = "merge"
_BACK, _IN_ORDER = "back", "in-order"
_MOST_SIZES = 6
_FEWEST = 2
_LN2 = math.log(2.0)


@dataclass(frozen=True)
class Block:
    """What queries make of a block: `lse` and `top` of the scores that they see, and `mean` of all of its scores.

    `seen` and `count` are how many keys of it a query sees, and how many there are. Shapes: (..., s, 1).
    """

    lse: Tensor
    top: Tensor
    mean: Tensor
    seen: Tensor
    count: Tensor


@dataclass(frozen=True)
class _State:
    """The weights (..., s, S) of the values after some blocks, and the logarithm (..., s, 1) of their sum."""

    weights: Tensor
    log: Tensor


Measure = Callable[[Block], Tensor]
Join = Callable[[_State, _State], _State]

MEASURES: Mapping[str, Measure] = {
    "base-2": lambda block: block.lse * _LN2,
    "of-base-2": lambda block: block.lse / _LN2,
    "opposite": lambda block: -block.lse,
    "largest": lambda block: block.top,
    "of-own-largest": lambda block: block.lse - block.top,
    "less-mean": lambda block: block.lse - block.mean,
    "mean-of-seen": lambda block: block.lse - block.seen.log(),
    "equal": lambda block: torch.zeros_like(block.lse),
}
"""What stands for the logsumexp of a block where blocks are weighed."""


def _scaled(old: Tensor, new: Tensor, before: _State, block: _State) -> Tensor:
    return old * before.weights + new * block.weights


def _join_by(choose: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Join:
    """Return a merge whose two weights are chosen from the right ones."""

    def join(before: _State, block: _State) -> _State:
        total = torch.logaddexp(before.log, block.log)
        old, new = choose((before.log - total).exp(), (block.log - total).exp())
        return _State(_scaled(old, new, before, block), total)

    return join


def _take_last(before: _State, block: _State) -> _State:
    is_seen = torch.isfinite(block.log)
    return _State(
        torch.where(is_seen, block.weights, before.weights), torch.where(is_seen, block.log, before.log)
    )


def _keep_log(of_block: bool) -> Join:
    """Return a merge after which the logarithm is that of one of the two, and not that of both."""

    def join(before: _State, block: _State) -> _State:
        merged = _merge(before, block)
        is_other = torch.isfinite(block.log)
        return _State(
            merged.weights, torch.where(is_other, block.log, before.log) if of_block else before.log
        )

    return join


def _add_undivided(before: _State, block: _State) -> _State:
    top = torch.maximum(before.log, block.log)
    weights = _scaled((before.log - top).exp(), (block.log - top).exp(), before, block)
    return _State(weights, torch.logaddexp(before.log, block.log))


_merge = _join_by(lambda old, new: (old, new))

JOINS: Mapping[str, Join] = {
    "earlier-whole": _join_by(lambda old, new: (torch.ones_like(old), new)),
    "later-whole": _join_by(lambda old, new: (old, torch.ones_like(new))),
    "both-whole": _join_by(lambda old, new: (torch.ones_like(old), torch.ones_like(new))),
    "exchanged": _join_by(lambda old, new: (new, old)),
    "both-earlier": _join_by(lambda old, new: (old, old)),
    "both-later": _join_by(lambda old, new: (new, new)),
    "earlier-twice": _join_by(lambda old, new: (old * old, new)),
    "later-twice": _join_by(lambda old, new: (old, new * new)),
    "last-alone": _take_last,
    "log-of-last": _keep_log(of_block=True),
    "log-of-first": _keep_log(of_block=False),
    "of-largest": _add_undivided,
}
"""What is made of the blocks so far and of a further one."""

RULES = (*MEASURES, *JOINS)
POWER, OTHERS_TIMES = "power", "others-times"
FITTED: Mapping[str, tuple[float, ...]] = {POWER: (0.5, 2.0), OTHERS_TIMES: (0.5, 2.0)}
"""Rules with a number: a power of the blocks' sums, or how often all blocks but the first count; and its starts."""

_SPELLED_OTHERWISE = frozenset({"of-own-largest", "equal", "both-whole"})
"""Rules that `moeverify.diagnose.own.merging` has too, for the chunks of ranks."""

_EITHER_WAY_ROUND = frozenset({"exchanged", "of-largest"})
"""Joins that give the same of two blocks in any order."""


def weigh_blocks(scores: Tensor, visible: Tensor, turns: Tensor, rule: str, number: float = 1.0) -> Tensor:
    """Return the weights (..., s, S) of the values where blocks are merged by a rule.

    `scores` (..., s, S) are those of all keys, of which a query sees the `visible` ones; `turns` (s, S) say in which
    turn it meets each. With no rule these are the weights of one softmax.
    """
    measure, join = MEASURES.get(rule, _take_lse), JOINS.get(rule, _merge)
    state: _State | None = None
    for turn in range(int(turns.max()) + 1):
        inside = turns == turn
        found = _look_at(scores, visible, inside)
        lse = torch.where(found.seen > 0, found.lse, torch.zeros_like(found.lse))
        weights = (scores - lse).exp().masked_fill(~(inside & visible), 0.0)
        log = measure(found) * (number if rule == POWER else 1.0)
        if rule == OTHERS_TIMES and turn:
            log = log + math.log(number)
        log = torch.where(found.seen > 0, log, torch.full_like(log, -torch.inf))
        block = _State(weights, log)
        if state is None:
            state = block
            continue
        # Where a query has met nothing so far, there is nothing to merge.
        merged, is_first = join(state, block), ~torch.isfinite(state.log)
        state = _State(torch.where(is_first, weights, merged.weights), torch.where(is_first, log, merged.log))
    assert state is not None
    return state.weights


def _take_lse(block: Block) -> Tensor:
    return block.lse


def _look_at(scores: Tensor, visible: Tensor, inside: Tensor) -> Block:
    seen = (inside & visible).expand(scores.shape)
    part = scores.masked_fill(~seen, -torch.inf)
    count = inside.sum(-1, keepdim=True).to(scores.dtype)
    mean = scores.masked_fill(~inside, 0.0).sum(-1, keepdim=True) / count.clamp(min=1.0)
    return Block(
        torch.logsumexp(part, -1, keepdim=True),
        part.amax(-1, keepdim=True),
        mean,
        seen.sum(-1, keepdim=True).to(scores.dtype),
        count,
    )


def list_merges(num_ranks: int, length: int) -> list[Change]:
    """Return the rules by which the chunks of ranks, or blocks of so many keys, may be merged: `name` says which.

    Ranks meet each other's chunks around a ring, the other way round, or in their order.
    """
    if num_ranks == 1:
        return [
            Change(part=MERGE, way=rule, name=str(size)) for size in _list_sizes(length) for rule in RULES
        ]
    orders = ("", _BACK, _IN_ORDER) if num_ranks > _FEWEST else ("", _IN_ORDER)
    found = [Change(part=MERGE, way=rule) for rule in MEASURES if rule not in _SPELLED_OTHERWISE]
    joins = [rule for rule in JOINS if rule not in _SPELLED_OTHERWISE]
    found += [Change(part=MERGE, way=rule, name=name) for name in orders for rule in joins]
    is_once = num_ranks == _FEWEST
    return [each for each in found if not (is_once and each.name and each.way in _EITHER_WAY_ROUND)]


def fit_merges(num_ranks: int) -> list[Change]:
    """Return the rules with a number, at their starts, of chunks of ranks."""
    starts = [(rule, start) for rule, some in FITTED.items() for start in some if num_ranks > 1]
    return [Change(part=MERGE, way=rule, number=start) for rule, start in starts]


def number_turns(owner: Tensor, key_owner: Tensor, name: str, num_ranks: int) -> Tensor:
    """Return in which turn (s, S) each query meets each key; owners are (s, 1) and (S)."""
    if name.isdecimal():
        length = len(key_owner)
        return (torch.arange(length) // int(name)).expand(len(owner), length)
    turns = {_BACK: (key_owner - owner) % num_ranks, _IN_ORDER: key_owner.expand(len(owner), -1)}
    return turns[name] if name in turns else (owner - key_owner) % num_ranks


def _list_sizes(length: int) -> list[int]:
    sizes = [size for size in range(2, length // 2 + 1) if length % size == 0]
    return [size for size in sizes if size & (size - 1) == 0 or size == length // 2][-_MOST_SIZES:]
