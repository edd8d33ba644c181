"""Attention from the right queries, keys and values, which are taken before their rotation.

Letters: B rows, S tokens of a row, b and s of what is asked for, N heads, D width of a query and key head, Dv of a
value's, R of its part that is rotated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Literal

import torch
from torch import Tensor

from moeverify.diagnose.replay.blocks import MERGE, fit_merges, list_merges, number_turns, weigh_blocks
from moeverify.diagnose.replay.blocks_back import KEYS, count_keys, weigh_back
from moeverify.diagnose.replay.blocks_back import PART as BLOCKS_BACK
from moeverify.diagnose.replay.chunks import Chunks
from moeverify.diagnose.replay.gradient_ways import (
    GRADIENT_OF,
    list_edge_ways,
    list_group_ways,
    list_score_ways,
    weigh_gradient,
)
from moeverify.diagnose.replay.grammar import (
    HEAD_FUNCTIONS,
    fit_functions,
    list_functions,
    visit,
    with_gradient_of,
)
from moeverify.diagnose.replay.head_layouts import PART as LAYOUT
from moeverify.diagnose.replay.head_layouts import list_layouts, relay, takes
from moeverify.diagnose.replay.language import Cell, Formula, draw_like
from moeverify.diagnose.replay.merging import SOFTMAXES, STEPS, Merged, merge_by_steps, merge_softmaxes
from moeverify.diagnose.replay.raw_heads import RawHeads, read_heads
from moeverify.diagnose.replay.rotation import Rotation
from moeverify.diagnose.replay.scores import Sizes, change_scores, fit_scores, list_scales
from moeverify.model.attention import Attention
from moeverify.model.mla import LatentAttention
from moeverify.results.change import Change

_GLOBAL, _IN_CHUNK, _ARRIVED, _OWNER = "position", "place", "arrival", "owner"
NORMS = ("query-norm", "key-norm", "norms")
_NORM_WAYS = ("none", "after", "twice", "of-unit-length", "exchanged", "of-head", "of-all")
_VISITED = ("queries", "keys", "values", "heads")


class AttentionFormula(Formula):
    """softmax(scale * q k^T) v over the keys that a query sees, heads one after another (b, s, N * Dv)."""

    # Pairs with these would be as many as all others.
    alone = frozenset({MERGE, "value-rotation", LAYOUT, *NORMS, *(f"{edge}-through" for edge in _VISITED)})

    def __init__(
        self, module: Attention | LatentAttention, x: Tensor, valid: Tensor | None, chunks: Chunks
    ) -> None:
        self.q, self.k, self.v = read_heads(module, x)
        self.valid = torch.ones(x.shape[:2], dtype=torch.bool) if valid is None else valid
        self.chunks = chunks
        is_latent = isinstance(module, LatentAttention)
        width, self.block = self.q.shape[-1], self.v.shape[-1]
        rotated = module.sizes.qk_rope if isinstance(module, LatentAttention) else module.head_dim
        self.rotation = Rotation(module.rope_theta, module.yarn, width, rotated, in_neighbours=is_latent)
        self.sizes = Sizes(width, self.block, rotated, x.shape[-1], self.q.shape[2], self.k.shape[2])
        self.norms = RawHeads.of(module, x) if isinstance(module, Attention) else None
        length = self.k.shape[1]
        norms = [] if self.norms is None else [(part, way) for part in NORMS for way in _NORM_WAYS]
        self.ways = [
            *self._list_masks(),
            *list_scales(length),
            *self.rotation.list_ways(self._list_lengths(), chunks.splits, len(chunks.positions)),
            *(Change(part=part, way=way) for part, way in norms),
            *self._list_others(),
            *self._list_reaches(),
            *list_layouts(self.v.shape, len(chunks.positions)),
            *list_merges(len(chunks.positions), length),
            *(way for edge in _VISITED for way in list_functions(f"{edge}-through", HEAD_FUNCTIONS)),
        ]
        self.fits = [*fit_scores(length), *self.rotation.list_fits(), *fit_merges(len(chunks.positions))]
        self.fits += [Change(part="softmax", way="extra", number=number) for number in (0.5, 4.0)]
        self.fits += [
            fit
            for edge in _VISITED
            for fit in fit_functions(f"{edge}-through", but=("times", "plus", "minus", "clamped-above"))
        ]
        self.fits += [Change(part="hidden", way=way, number=5.0) for way in ("lowered", "value")]
        self.backward = self._list_backward()

    def _list_backward(self) -> list[Change]:
        """Return what may be otherwise in the backward pass alone."""
        group = self.q.shape[2] // self.k.shape[2]
        is_whole = len(self.chunks.positions) == 1
        return [
            *list_score_ways("denominator", of_keys=False),
            *list_score_ways("scores", "weights", operands=("weights", "scores")),
            *list_group_ways("key-groups", "value-groups", size=group),
            *self.rotation.list_backward(),
            *list_edge_ways("queries", "keys", "values", "heads", over_tokens=is_whole),
        ]

    def redraw(self) -> Formula | None:
        """Return attention over heads that are drawn anew; not where norms stand before, whose inputs are others."""
        if self.norms is not None:
            return None
        other = copy(self)
        other.q, other.k, other.v = (
            draw_like(each, seed) for seed, each in enumerate((self.q, self.k, self.v))
        )
        return other

    def _list_masks(self) -> list[Change]:
        found = [Change(part="mask", way=way) for way in ("none", "diagonal", "reversed")]
        found += [Change(part="mask", way="offset", number=number) for number in (1, 2, -2, -3)]
        found += [Change(part="mask", way=way) for way in _ORDERS]
        found += [Change(part="mask", way="of-rank", number=number) for number in (1, -1)]
        found += [Change(part="mask", way=way) for way in ("of-own", "of-others")]
        return found + [Change(part="hidden", way=way) for way in ("zero-score", "after-softmax")]

    def _list_others(self) -> list[Change]:
        found = [Change(part="heads", way=way) for way in ("modulo", "reversed", "next", "first", "of-rank")]
        count = self.q.shape[2]
        sizes = [size for size in range(2, count + 1) if count % size == 0]
        found += [
            Change(part="outputs", way=way, number=size)
            for size in sizes
            for way in (_HEAD_ORDERS if size > 2 else ("next", "transposed"))
        ]
        found += [
            Change(part="outputs", way=way, number=size)
            for size in sizes[:-1]
            for way in (_GROUP_ORDERS if count > 2 * size else ("next-group",))
        ]
        for part in ("keys", "values", "keys-and-values"):
            found += [
                Change(part=part, way=way) for way in ("own", "arrival", "position", "reversed", "exchanged")
            ]
            found += [Change(part=part, way="of-keys")] if part == "values" else []
            for way in ("of-rank", "of-position", "of-row"):
                found += [Change(part=part, way=way, number=number) for number in (1, -1)]
        ways = ["mean-of-chunks", "sum-of-chunks", "extra-one", "not-normalized", "of-heads"]
        ways += ["relative", "of-queries", "sigmoid", "relu", "squared", "largest-alone"]
        ways += [way for way in SOFTMAXES if way not in ways]
        found += [Change(part="softmax", way=way) for way in ways]
        return found + [Change(part=MERGE, way=way) for way in STEPS]

    def _list_lengths(self) -> Sequence[int]:
        """Return the numbers of positions that something may be cut to: all, or where these are many some."""
        length = self.k.shape[1]
        if length <= _MOST_LENGTHS:
            return range(1, length)
        powers = {2**power for power in range(length.bit_length()) if 2**power < length}
        return sorted(powers | {length // count for count in range(2, 9)} | {length - 1})

    def _list_reaches(self) -> list[Change]:
        """Return which keys may be left out, beside those that the mask hides."""
        length, size = self.k.shape[1], len(self.chunks.positions)
        found = [
            Change(part="reach", way=way) for way in ("valid", "own", "not-own", "own-run", "not-own-run")
        ]
        for way, numbers in (
            ("without-rank", range(size)),
            ("without-turn", range(1, size) if size > 2 else ()),
            ("without-run", range(int(self.chunks.run.max()) + 1)),
        ):
            found += [Change(part="reach", way=way, number=number) for number in numbers]
        found += [Change(part="reach", way="without-key", number=number) for number in (0, length - 1)]
        found += [Change(part="reach", way="blocks", number=n) for n in range(2, length) if length % n == 0]
        for way in ("window", "beyond", "boundary", "prefix"):
            # A mask that is off by a few positions hides the last few too.
            least = _MOST_OFFSET + 1 if way == "beyond" else 1
            lengths = [number for number in self._list_lengths() if number >= least]
            found += [Change(part="reach", way=way, number=number) for number in lengths]
        return found

    def evaluate(self, cell: Cell, changes: Mapping[str, Change]) -> Tensor:
        """Return the heads' outputs (b, s, heads * Dv) of a cell."""
        heads = _exchange(cell.dims[-1][:: self.block] // self.block, changes.get("outputs"))
        place = _Queries(cell, self.chunks)
        q = self._prepare("query", cell, cell.positions, place.numbers, changes)[:, :, heads]
        k = self._prepare("key", cell, torch.arange(self.k.shape[1]), self._numbers(), changes)
        k = visit(k, "keys", changes)
        q = visit(q, "queries", changes)
        v = self.v[cell.rows]
        if LAYOUT in changes:
            q, k, v = self._relay(q, k, v, cell, changes[LAYOUT], heads)
        k = self._reorder(k, changes.get("keys") or changes.get("keys-and-values"), cell)
        if "values" in changes and changes["values"].way == "of-keys":
            v = k if k.shape == v.shape else v * torch.nan
        if "value-rotation" in changes:
            v = self._rotate_values(v, changes["value-rotation"])
        v = self._reorder(v, changes.get("values") or changes.get("keys-and-values"), cell)
        v = visit(v, "values", changes)
        sources = self._find_sources(heads, changes.get("heads"))
        scale = self.sizes.find_scale(changes.get("scale"), cell.positions)
        keys = weigh_gradient(k[:, :, sources], "key-groups", changes)
        scores = torch.einsum("bsnd,btnd->bnst", q, keys) * scale
        operands = {"scores": scores}
        scores = weigh_gradient(scores, "scores", changes, operands)
        if KEYS in changes:
            scores = count_keys(scores, self._turns(place), changes[KEYS])
        if "scores" in changes:
            scores = change_scores(scores, cell.positions, heads, self.q.shape[2], changes["scores"])
        visible = self._see(cell, place, changes).unsqueeze(1)
        merged = self._normalize(scores, visible, place, changes)
        operands["weights"] = merged.weights  # asked for when the gradient comes back
        weights = weigh_gradient(merged.weights, "weights", changes, operands)
        values = weigh_gradient(v[:, :, sources], "value-groups", changes)
        mixed = torch.einsum("bnst,btnd->bsnd", weights, values)
        mixed = mixed + merged.added.transpose(1, 2)
        mixed = torch.where(visible.any(-1).squeeze(1)[..., None, None], mixed, torch.nan)
        return visit(mixed, "heads", changes).flatten(2)

    def _relay(
        self, q: Tensor, k: Tensor, v: Tensor, cell: Cell, change: Change, heads: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values that were read in another layout after their rotation."""
        rows, parts = torch.arange(len(self.q)), self.chunks.positions
        everything = Cell(cell.rank, rows, cell.places, cell.positions, cell.dims)
        at = torch.arange(self.k.shape[1])
        if takes(change, "queries"):
            whole = self._prepare("query", everything, at, self._numbers(), {})
            q = relay(whole, change.way, parts)[cell.rows][:, cell.positions][:, :, heads]
        if takes(change, "keys"):
            k = relay(self._prepare("key", everything, at, self._numbers(), {}), change.way, parts)[cell.rows]
        if takes(change, "values"):
            v = relay(self.v, change.way, parts)[cell.rows]
        return q, k, v

    def _numbers(self) -> Mapping[str, Tensor]:
        """Return the numbers of the keys of all positions."""
        length = self.k.shape[1]
        return {
            _GLOBAL: torch.arange(length),
            _IN_CHUNK: self.chunks.place,
            _ARRIVED: self.chunks.arrival,
            _OWNER: self.chunks.owner,
            **self.chunks.splits,
        }

    def _prepare(
        self,
        which: Literal["query", "key"],
        cell: Cell,
        positions: Tensor,
        numbers: Mapping[str, Tensor],
        changes: Mapping[str, Change],
    ) -> Tensor:
        """Return queries or keys (b, s, N, D) as the scores take them: normalized, then rotated, or otherwise."""
        whole = self.q if which == "query" else self.k
        x = whole[cell.rows][:, positions]
        turn = changes.get(f"{which}-rotation") or changes.get("rotation")
        norm = changes.get(f"{which}-norm") or changes.get("norms")
        if norm is not None and self.norms is not None:
            raw = self.norms.find(which)[cell.rows][:, positions]
            if norm.way == "after":
                return self.norms.normalize(self.rotation.turn(raw, numbers, turn), which, norm)
            x = self.norms.normalize(raw, which, norm)
        turned = self.rotation.turn(x, numbers, turn)
        if "rotation-back" in changes:
            turned = with_gradient_of(turned, self.rotation.turn(x, numbers, changes["rotation-back"]))
        return turned

    def _rotate_values(self, v: Tensor, change: Change) -> Tensor:
        """Return values (b, S, N, Dv) that are rotated as keys are, or back."""
        if v.shape[-1] != self.rotation.width:
            return v * torch.nan
        way = None if change.way == "added" else Change(part="rotation", way=change.way)
        return self.rotation.turn(v, self._numbers(), way)

    def _find_sources(self, heads: Tensor, change: Change | None) -> Tensor:
        """Return the key-value head that each query head reads."""
        count = self.k.shape[2]
        group = self.q.shape[2] // count
        right = heads // group
        local = heads - heads.min()
        ways = {
            "modulo": heads.min() // group + local % max(len(heads) // group, 1),
            "reversed": count - 1 - right,
            "next": (right + 1) % count,
            "first": torch.zeros_like(right),
            "of-rank": local // group,
        }
        return right if change is None else ways[change.way]

    def _reorder(self, x: Tensor, change: Change | None, cell: Cell) -> Tensor:
        """Return keys or values (b, S, N, D) where those of others stand in the place of each."""
        if change is None or change.way == "of-keys":
            return x
        chunks, number, length = self.chunks, int(change.number or 0), x.shape[1]
        if change.way == "of-row":
            return x.roll(-number, 0) if len(cell.rows) > 1 else x * torch.nan
        owners = set(chunks.owner[cell.positions].tolist())
        if change.way == "own" and len(owners) > 1:
            return x * torch.nan
        size = len(chunks.positions[0])
        ways = {
            "own": lambda: chunks.order[min(owners) * size + chunks.place],
            "arrival": lambda: chunks.order,
            "position": lambda: chunks.arrival,
            "reversed": lambda: chunks.order[length - 1 - chunks.arrival],
            "exchanged": lambda: chunks.order[chunks.owner * size + (chunks.place + size // 2) % size],
            "of-rank": lambda: chunks.shift(number),
            "of-position": lambda: torch.arange(length).roll(-number),
        }
        return x[:, ways[change.way]()]

    def _see(self, cell: Cell, place: _Queries, changes: Mapping[str, Change]) -> Tensor:
        """Return which keys each query sees (b, s, S)."""
        keys, mask, reach = self._numbers(), changes.get("mask"), changes.get("reach")
        at, key = place.numbers[_GLOBAL].unsqueeze(-1), keys[_GLOBAL]
        seen = key <= at
        if mask is not None and mask.way in ("none", "diagonal", "reversed", "offset"):
            offset = int(mask.number or 0) if mask.way == "offset" else -1
            seen = {"none": torch.ones_like(seen), "reversed": key >= at}.get(mask.way, key <= at + offset)
        elif mask is not None and mask.way in ("of-own", "of-others"):
            seen = seen | ((self.chunks.owner != place.owner) == (mask.way == "of-own"))
        elif mask is not None and mask.way == "of-rank":
            seen = self.chunks.shift(int(mask.number or 0)) <= at
        elif mask is not None:
            query_order, key_order = _ORDERS[mask.way]
            found = self.chunks.owner if key_order == "owner" else keys[key_order]
            seen = found <= place.order(query_order).unsqueeze(-1)
        if reach is not None and reach.way == "prefix":
            seen = torch.ones_like(seen)
        whole = seen.expand(len(cell.rows), *seen.shape)
        return whole if reach is None else whole & self._reach(reach, cell, place, at)

    def _reach(self, reach: Change, cell: Cell, place: _Queries, at: Tensor) -> Tensor:
        """Return which keys may be seen at all, broadcast to (b, s, S)."""
        chunks, number, key = self.chunks, int(reach.number or 0), torch.arange(self.k.shape[1])
        if reach.way == "valid":
            return self.valid[cell.rows].unsqueeze(1)
        own, run = chunks.owner == place.owner, chunks.run == chunks.run[place.numbers[_GLOBAL]].unsqueeze(-1)
        ways = {
            "own": lambda: own,
            "not-own": lambda: ~own,
            "own-run": lambda: run,
            "not-own-run": lambda: ~run,
            "without-rank": lambda: chunks.owner != number,
            "without-turn": lambda: (place.owner - chunks.owner) % len(chunks.positions) != number,
            "without-run": lambda: chunks.run != number,
            "without-key": lambda: key != number,
            "blocks": lambda: key // number == at // number,
            "window": lambda: at - key < number,
            "beyond": lambda: at - key >= number,
            "boundary": lambda: (key < number) == (at < number),
            "prefix": lambda: (key < number) | (key <= at),
        }
        return ways[reach.way]().expand(len(cell.positions), -1)

    def _normalize(
        self, scores: Tensor, visible: Tensor, place: _Queries, changes: Mapping[str, Change]
    ) -> Merged:
        """Return the weights of the values: a softmax over visible keys, or otherwise."""
        masked = scores.masked_fill(~visible, -torch.inf)
        if BLOCKS_BACK in changes:
            weights = weigh_back(masked, self._turns(place), changes[BLOCKS_BACK])
            return Merged(weights, torch.zeros_like(weights[..., :1]))
        merge, owner, size = changes.get(MERGE), self.chunks.owner, len(self.chunks.positions)
        if merge is not None and merge.way in STEPS:
            return merge_by_steps(masked, place.owner, owner, size, merge.way)
        if merge is not None:
            turns = number_turns(place.owner, owner, merge.name, size)
            weights = weigh_blocks(scores, visible, turns, merge.way, float(merge.number or 1.0))
        else:
            weights = self._weigh(scores, visible, place, changes)
        return Merged(weights, torch.zeros_like(weights[..., :1]))

    def _turns(self, place: _Queries) -> Tensor:
        return number_turns(place.owner, self.chunks.owner, "", len(self.chunks.positions))

    def _weigh_hidden(self, scores: Tensor, visible: Tensor, change: Change) -> Tensor:
        """Return weights of which hidden keys have some, or that are not normalized over the visible ones."""
        number = float(change.number or 0.0)
        ways = {
            "zero-score": lambda: torch.where(visible, scores, torch.zeros_like(scores)),
            "lowered": lambda: torch.where(visible, scores, scores - number),
            "value": lambda: torch.where(visible, scores, torch.full_like(scores, -number)),
        }
        if change.way in ways:
            return ways[change.way]().softmax(-1)
        return scores.softmax(-1) * visible

    def _weigh(
        self, scores: Tensor, visible: Tensor, place: _Queries, changes: Mapping[str, Change]
    ) -> Tensor:
        change, hidden = changes.get("softmax"), changes.get("hidden")
        way = "" if change is None else change.way
        if hidden is not None:
            return self._weigh_hidden(scores, visible, hidden)
        masked = scores.masked_fill(~visible, -torch.inf)
        top = masked.amax(-1, keepdim=True).detach()  # it cancels out, and so does its gradient
        share = (masked - torch.where(torch.isfinite(top), top, torch.zeros_like(top))).exp()
        if way in SOFTMAXES:
            return merge_softmaxes(masked, place.owner, self.chunks.owner, len(self.chunks.positions), way)
        if way in _UNLIKE:
            return _UNLIKE[way](masked, visible)
        total = share.sum(-1, keepdim=True)
        if f"{GRADIENT_OF}:denominator" in changes:
            # Of its logarithm, as kernels keep it: what comes back is then the mean of the gradient of the weights.
            total = weigh_gradient(total.log(), "denominator", changes).exp()
        if way in ("extra-one", "extra"):
            total = total + (1.0 if change is None else float(change.number or 1.0)) * (-top).exp()
        elif way == "relative":
            total = torch.ones_like(total)
        elif way == "not-normalized":
            total = (-top).exp()
        return share / total


def _exchange(heads: Tensor, change: Change | None) -> Tensor:
    """Return the heads whose outputs stand in the places of a rank's heads: of others in each group, or other groups.

    Of ranks that trade heads for positions each has a group, and takes that of another one.
    """
    size = 1 if change is None else int(change.number or 1)
    if change is None or len(heads) % size:
        return heads
    groups = heads.view(-1, size)
    ways = {
        "next": lambda: groups.roll(-1, 1),
        "previous": lambda: groups.roll(1, 1),
        "reversed": lambda: groups.flip(1),
        "transposed": lambda: groups.T,
        "next-group": lambda: groups.roll(-1, 0),
        "previous-group": lambda: groups.roll(1, 0),
        "reversed-groups": lambda: groups.flip(0),
    }
    return ways[change.way]().reshape(-1)


def _over(dim: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a softmax of the visible scores over another dim than that of the keys."""

    def weigh(masked: Tensor, visible: Tensor) -> Tensor:
        del visible
        share = (masked - masked.amax(dim, keepdim=True)).exp().nan_to_num()
        return share / share.sum(dim, keepdim=True).clamp(min=1e-300)

    return weigh


# Weights of visible keys by masked scores (b, N, s, S) that are no softmax over the keys.
_UNLIKE: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "of-heads": _over(1),
    "of-queries": _over(2),
    "sigmoid": lambda masked, visible: masked.sigmoid(),
    "relu": lambda masked, visible: masked.clamp(min=0.0),
    "squared": lambda masked, visible: masked.softmax(-1).square(),
    "largest-alone": lambda masked, visible: (masked == masked.amax(-1, keepdim=True)).to(masked.dtype),
}


# The order of queries and that of keys which a causal mask compares, where these are not positions.
_ORDERS: Mapping[str, tuple[str, str]] = {
    "places": (_IN_CHUNK, _IN_CHUNK),
    "arrivals": (_ARRIVED, _ARRIVED),
    "place-of-query": (_IN_CHUNK, _GLOBAL),
    "place-of-key": (_GLOBAL, _IN_CHUNK),
    "arrival-of-query": (_ARRIVED, _GLOBAL),
    "arrival-of-key": (_GLOBAL, _ARRIVED),
    "top-left": (_IN_CHUNK, _ARRIVED),
    "bottom-right": ("end", _ARRIVED),
    "ranks": ("owner", "owner"),
}
_HEAD_ORDERS = ("next", "previous", "reversed", "transposed")
_GROUP_ORDERS = ("next-group", "previous-group", "reversed-groups")
_MOST_LENGTHS = 64
_MOST_OFFSET = 3


class _Queries:
    """The numbers of the queries of a cell (s), by what is counted."""

    def __init__(self, cell: Cell, chunks: Chunks) -> None:
        self.owner = chunks.owner[cell.positions].unsqueeze(-1)
        self.numbers: Mapping[str, Tensor] = {
            _GLOBAL: cell.positions,
            _IN_CHUNK: chunks.place[cell.positions],
            _ARRIVED: chunks.arrival[cell.positions],
            _OWNER: chunks.owner[cell.positions],
            **{name: numbers[cell.positions] for name, numbers in chunks.splits.items()},
        }
        self._length = len(chunks.order)
        self._chunk = max(map(len, chunks.positions))

    def order(self, name: str) -> Tensor:
        """Return the numbers by name; `end` counts the places such that the last is the row's last."""
        if name == "end":
            return self.numbers[_IN_CHUNK] + self._length - self._chunk
        return self.owner.squeeze(-1) if name == "owner" else self.numbers[name]
