"""Mistakes in how a user's attention is merged of blocks of keys, where one device takes all of them at once.

Letters: S positions of a row; what stands before is as many dims as there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moeverify.diagnose.own.blocks import MERGE, fit_merges, list_merges, number_turns, weigh_blocks
from moeverify.diagnose.own.blocks_back import (
    KEYS,
    NO_DELTA,
    choose_keys,
    count_keys,
    list_back,
    list_keys_back,
    weigh_back,
)
from moeverify.diagnose.own.blocks_back import PART as BLOCKS_BACK
from moeverify.diagnose.own.merging import SOFTMAXES, STEPS, merge_by_steps, merge_softmaxes
from moeverify.diagnose.own.replay import Candidate, Stage
from moeverify.diagnose.own.step_mistakes import Site, name_step
from moeverify.diagnose.own.steps import Function, Step
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.change import Change
from moeverify.results.own_module import Mistake

_QUERIES = "queries"
_SOFTMAX, _WHOLE = "softmax", "scaled_dot_product_attention"
_HIDDEN = -1e30
"""What is less hides a score."""

_OF_ALL_SCORES = frozenset({("mask", "of-own"), ("mask", "of-others"), (MERGE, "less-mean")})
"""Ways that need the scores that are hidden too."""

_OF_BLOCKS = (
    *("numerator-opposite", "denominator-opposite", "both-opposite"),
    *("numerator-first", "denominator-first", "denominator-mean"),
)


@dataclass(frozen=True)
class Positions:
    """Which of `size` ranks of a context group has each position, `owner` (S); one, where they are undivided."""

    owner: Tensor
    size: int

    @classmethod
    def of(cls, tensor: WrongTensor) -> Positions | None:
        """Return how ranks divide the positions of a tensor (B, S, ...); None where it has none."""
        if tensor.expected.ndim < 3:
            return None
        length = tensor.expected.shape[1]
        parts = dict.fromkeys(
            tuple(shard.region.dims[1]) for shard in sorted(tensor.shards, key=lambda each: each.rank)
        )
        owner = torch.full((length,), -1)
        for number, part in enumerate(parts):
            owner[list(part)] = number
        is_divided = sum(map(len, parts)) == length and bool((owner >= 0).all())
        return cls(owner, len(parts)) if is_divided else None


def list_merge_mistakes(
    sites: Sequence[Site],
    steps: Sequence[Step],
    module: str,
    positions: Positions | None,
    *,
    is_forward: bool,
) -> Iterator[Candidate]:
    """Yield softmaxes over all keys that are made of blocks of them: of ranks' chunks, or of so many keys.

    Or those of which the backward pass alone is made otherwise of ranks' chunks.
    """
    if positions is None:
        return
    length = len(positions.owner)
    for site in sites:
        scores = _find_scores(site.step, steps, length)
        if scores is None:
            continue
        changes = _list_changes(positions, length) if is_forward else _list_back(positions, site.step.name)
        for change, start in changes:
            if (change.part, change.way) in _OF_ALL_SCORES and not scores.is_whole:
                continue
            inside = ".".join(each for each in (module, site.step.module) if each)
            mistake = Mistake(
                part="step",
                name=name_step(site.step),
                way=f"merged:{change.part}/{change.way}",
                module=inside,
                line=site.step.line,
                after=change.name,
                number=change.number,
            )
            yield Candidate(mistake, _plant(site, scores, change, positions), start)


def _list_changes(positions: Positions, length: int) -> Iterator[tuple[Change, float | None]]:
    """Yield what may be otherwise, and where a number of it is looked for from."""
    size = positions.size
    merges = list_merges(size, length)
    if size == 1:
        names = dict.fromkeys(each.name for each in merges)
        ring = [way for way in SOFTMAXES if way.startswith("ring-")]
        merges += [Change(part="softmax", way=way, name=name) for name in names for way in ring]
        merges += [Change(part=MERGE, way=way, name=name) for name in names for way in _OF_BLOCKS]
    else:
        merges += [Change(part="softmax", way=way) for way in SOFTMAXES]
        merges += [Change(part=MERGE, way=way) for way in STEPS]
        merges += [Change(part="reach", way=way) for way in ("own", "not-own")]
        merges += [Change(part="mask", way=way) for way in ("of-own", "of-others")]
        for way, first in (("without-rank", 0), ("without-turn", 1)):
            merges += [
                Change(part="reach", way=way, number=n) for n in range(first, size) if size > first + 1
            ]
    yield from ((each, None) for each in merges)
    yield from ((each, each.number) for each in fit_merges(size))


def _list_back(positions: Positions, step: str) -> Iterator[tuple[Change, None]]:
    """Yield what may be otherwise backward; which keys count for queries alone is known where both are taken."""
    yield Change(part=BLOCKS_BACK, way=NO_DELTA), None
    if positions.size > 1:
        found = [*list_back(positions.size), Change(part="softmax", way="sum-of-chunks")]
        yield from (
            (each, None) for each in found + (list_keys_back(positions.size) if step == _WHOLE else [])
        )
        ways = ("own", "not-own") if step == _WHOLE else ()
        yield from ((Change(part=_QUERIES, way=way), None) for way in ways)


@dataclass(frozen=True)
class _Scores:
    """How the scores of a step are made: `raw` of all keys where they are known before some were hidden.

    `is_whole` says whether hidden ones are known.
    """

    raw: Tensor | None = None
    is_whole: bool = True


def _find_scores(step: Step, steps: Sequence[Step], length: int) -> _Scores | None:
    """Return what a step of attention over all positions takes its softmax of; None of any other step."""
    if step.name == _WHOLE:
        tensors = [each for each in step.args if isinstance(each, Tensor)]
        is_square = len(tensors) > 2 and all(each.shape[-2] == length for each in tensors[:2])
        return _Scores() if is_square else None
    if step.name != _SOFTMAX or not step.args or not isinstance(step.result, Tensor):
        return None
    taken, result = step.args[0], step.result
    dim = step.named.get("dim", step.args[1] if len(step.args) > 1 else None)
    is_square = result.ndim > 1 and tuple(result.shape[-2:]) == (length, length)
    if not is_square or dim not in (-1, result.ndim - 1):
        return None
    visible = taken > _HIDDEN
    if bool(visible.all()):
        return _Scores(taken)
    for each in steps:
        before = each.result
        is_alike = isinstance(before, Tensor) and before.shape == taken.shape and before.is_floating_point()
        if is_alike and bool((before > _HIDDEN).all()) and torch.equal(before[visible], taken[visible]):
            return _Scores(before)
    return _Scores(is_whole=False)


def _plant(site: Site, scores: _Scores, change: Change, positions: Positions) -> Any:
    make = _attend if site.step.name == _WHOLE else _weigh

    def plant(stage: Stage, number: float) -> None:
        way = (
            change
            if change.number is None or change.part != MERGE
            else change.model_copy(update={"number": number})
        )
        stage.changes.update(dict.fromkeys(site.numbers, partial(make, scores, way, positions)))

    return plant


def _weigh(
    scores: _Scores,
    change: Change,
    positions: Positions,
    function: Function,
    args: tuple[Any, ...],
    named: dict[str, Any],
) -> Tensor:
    """Return the weights of a softmax step with a change."""
    result: Tensor = function(*args, **named)
    taken = args[0].to(result.dtype)
    visible = taken > _HIDDEN
    hidden = torch.zeros_like(taken) if scores.raw is None else scores.raw.to(result.dtype)
    raw = torch.where(visible, taken, hidden)  # a gradient comes back to those that are visible
    return _merge(change, raw, visible, positions)


def _attend(
    scores: _Scores,
    change: Change,
    positions: Positions,
    function: Function,
    args: tuple[Any, ...],
    named: dict[str, Any],
) -> Tensor:
    """Return what attention as one step puts out with a change."""
    q, k, v, mask, _, is_causal = (*args, *([None] * 6))[:6]
    mask, is_causal = named.get("attn_mask", mask), named.get("is_causal", is_causal)
    if q.shape[-3] != k.shape[-3]:
        k, v = (each.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for each in (k, v))
    scale = named.get("scale") or 1.0 / math.sqrt(q.shape[-1])
    turned = k.transpose(-1, -2)
    raw = q @ turned * scale
    if change.part in (KEYS, _QUERIES):
        # The gradient of the one comes through all scores, that of the other through some.
        counted, other = (q, turned.detach()), (q.detach(), turned)
        counted, other = (counted, other) if change.part == KEYS else (other, counted)
        part = count_keys(counted[0] @ counted[1], _turns(positions), change) * scale
        raw = part + (other[0] @ other[1]) * scale - raw.detach()
    visible = torch.ones(raw.shape[-2:], dtype=torch.bool, device=raw.device)
    if is_causal:
        visible = visible.tril()
    if mask is not None and mask.dtype is torch.bool:
        visible = visible & mask
    elif mask is not None:
        visible, raw = visible & (mask > _HIDDEN), raw + mask.masked_fill(~(mask > _HIDDEN), 0.0)
    weights = _merge(change, raw, visible, positions)
    merged: Tensor = weights @ v
    if change.part == _QUERIES:
        some: Tensor = (weights * choose_keys(_turns(positions), change)).detach() @ v
        merged = weights @ v.detach() + some - some.detach()
    return merged


def _turns(positions: Positions) -> Tensor:
    """Return in which turn (S, S) each query meets each key around the ring of ranks."""
    return number_turns(positions.owner.unsqueeze(-1), positions.owner, "", positions.size)


def _merge(change: Change, scores: Tensor, visible: Tensor, positions: Positions) -> Tensor:
    """Return the weights (..., S, S) of the values with a change."""
    owner, size = positions.owner.to(scores.device), positions.size
    queries, way = owner.unsqueeze(-1), change.way
    if change.name.isdecimal():
        blocks = torch.arange(len(owner), device=scores.device) // int(change.name)
        size = int(blocks.max()) + 1
        queries, owner = (
            torch.zeros_like(queries),
            -blocks % size,
        )  # in turn, as around a ring from the first on
    if change.part == MERGE and way not in STEPS:
        turns = number_turns(queries, owner, "" if change.name.isdecimal() else change.name, size)
        return weigh_blocks(scores, visible, turns, way, float(change.number or 1.0))
    if change.part == "mask":
        visible = visible | ((owner != queries) == (way == "of-own"))
    elif change.part == "reach":
        number = int(change.number or 0)
        reached = {
            "own": owner == queries,
            "not-own": owner != queries,
            "without-rank": (owner != number).expand(len(owner), -1),
            "without-turn": (queries - owner) % size != number,
        }
        visible = visible & reached[way]
    masked = scores.masked_fill(~visible, -torch.inf)
    if change.part == BLOCKS_BACK:
        return weigh_back(masked, _turns(positions), change)
    if change.part == "softmax":
        return merge_softmaxes(masked, queries, owner, size, way)
    if change.part == MERGE:
        return merge_by_steps(masked, queries, owner, size, way)
    return F.softmax(masked, -1)
