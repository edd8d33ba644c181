"""What attention passes back to its queries, keys and values, from the right gradient of its output.

Letters as in `moeverify.diagnose.replay.attention`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from typing import Literal

import torch
from torch import Tensor

from moeverify.diagnose.replay.attention import AttentionFormula
from moeverify.diagnose.replay.blocks_back import list_back, list_keys_back
from moeverify.diagnose.replay.chunks import Chunks
from moeverify.diagnose.replay.gradient_ways import GRADIENT_OF, needs_call
from moeverify.diagnose.replay.grammar import fit_gradients
from moeverify.diagnose.replay.head_layouts import GRADIENT, list_gradient_layouts, relay
from moeverify.diagnose.replay.language import Cell, Formula
from moeverify.diagnose.replay.tokenwise import pull_back
from moeverify.results.change import Change


class AttentionGradientFormula(Formula):
    """The gradient of queries, keys or values before their rotation, in the shape of `like` (B, S, ...).

    `gradient` is that of the heads' outputs (B, S, N * Dv). All that attention may have otherwise it may have so in
    its backward pass alone; besides, some queries may be left out of the sums for keys and values, or the sums may
    come to the keys of others.
    """

    def __init__(
        self, forward: AttentionFormula, of: Literal["q", "k", "v"], gradient: Tensor, like: Tensor
    ) -> None:
        self.forward, self.of, self.gradient = forward, of, gradient
        self.shape = like.shape[2:]
        size = len(forward.chunks.positions)
        ways = list_left_out(forward.chunks)
        moves = [Change(part="sums", way=way) for way in ("arrival", "position")]
        moves += [Change(part="sums", way="of-rank", number=number) for number in (1, -1)]
        heads = [Change(part="heads-of", way=way) for way in ("own", "not-own", "next", "reversed")]
        heads += [Change(part="heads-of", way="without-rank", number=number) for number in range(size)]
        is_cut = len(self.shape) == 2 or not math.prod(self.shape) % (size * forward.block)
        self.ways = [
            *([] if of == "q" or size == 1 else [*ways, *moves]),
            *(list_keys_back(size) if of == "q" else ()),
            *list_back(size),
            *(heads if size > 1 and is_cut else []),
            *forward.backward,
            *list_ways_back(forward),
            *list_gradient_layouts(
                (*gradient.shape[:2], gradient.shape[2] // forward.block, forward.block), size
            ),
        ]
        self.fits = list_fits_back(forward)
        # Each is a backward pass, and pairs with these would be as many as all others.
        self.alone = forward.alone | {GRADIENT_OF}

    def evaluate(self, cell: Cell, changes: Mapping[str, Change]) -> Tensor:
        """Return the gradient at a cell."""
        if needs_call(changes) and cell.call is not None and len(cell.rows) < len(cell.call[0]):
            return cell.pick_from_call(self.evaluate(cell.of_call(), changes))
        chunks, rows = self.forward.chunks, cell.rows
        with torch.enable_grad():
            inner = copy(self.forward)
            given = {name: getattr(inner, name)[rows].clone() for name in ("q", "k", "v")}
            for name, value in given.items():
                setattr(inner, name, value)
            inner.valid = inner.valid[rows]
            leaf = given[self.of].requires_grad_()
            positions = torch.arange(leaf.shape[1])
            heads = torch.arange(self.gradient.shape[-1])
            whole = Cell(cell.rank, torch.arange(len(rows)), chunks.place, positions, (heads,))
            output = inner.evaluate(whole, changes)
            weights = weigh_queries(changes.get("queries"), chunks, cell).to(self.gradient.dtype)
            found = pull_back(output, leaf, self._read(changes)[rows] * weights[:, None])
        change, at = changes.get("sums"), cell.positions
        if change is not None:
            orders = {"arrival": chunks.order, "position": chunks.arrival}
            order = chunks.shift(int(change.number or 0)) if change.way == "of-rank" else orders[change.way]
            at = order[at]
        if "heads-of" in changes:
            found = self._move_heads(found, changes["heads-of"], cell)
        picked: Tensor = found[:, at].reshape(len(rows), len(at), *self.shape)
        for dim, indices in enumerate(cell.dims, 2):
            picked = picked.index_select(dim, indices)
        return picked

    def _read(self, changes: Mapping[str, Change]) -> Tensor:
        """Return the gradient of the heads' outputs, which may have been read in another layout."""
        change = changes.get(GRADIENT)
        if change is None:
            return self.gradient
        heads = self.gradient.view(*self.gradient.shape[:2], -1, self.forward.block)
        return relay(heads, change.way, self.forward.chunks.positions).flatten(2)

    def _move_heads(self, found: Tensor, change: Change, cell: Cell) -> Tensor:
        """Return a gradient (b, S, N, D) whose heads came back from the ranks that each computed some of them."""
        size, width = len(self.forward.chunks.positions), found.shape[2]
        owners = set(self.forward.chunks.owner[cell.positions].tolist())
        if width % size or len(owners) > 1:
            return found * torch.nan
        part, own = torch.arange(width) // (width // size), min(owners)
        if change.way in ("next", "reversed"):
            slices = torch.arange(width).view(size, -1)
            turned = slices.roll(-1, 0) if change.way == "next" else slices.flip(0)
            return found[:, :, turned.flatten()]
        number = int(change.number or 0)
        kept = {"own": part == own, "not-own": part != own}.get(change.way, part != number)
        lost: Tensor = found * kept.to(found.dtype)[:, None]
        return lost


def list_ways_back(forward: AttentionFormula) -> list[Change]:
    """Return what attention may have otherwise in its backward pass alone.

    Merged otherwise the forward pass would be wrong before, and norms lie before what is asked for.
    """
    return [way for way in forward.ways if way.part not in forward.alone]


def list_fits_back(forward: AttentionFormula) -> list[Change]:
    """Return the same of what has a number; each step of a fit is a backward pass."""
    return [
        *fit_gradients("denominator"),  # all of a gradient is a factor, which needs no replay
        *(
            fit
            for fit in forward.fits
            if fit.part not in forward.alone and not fit.way.startswith("stretched")
        ),
    ]


def list_left_out(chunks: Chunks) -> list[Change]:
    """Return how some queries may be missing in the sums for keys and values, or count twice there."""
    size = len(chunks.positions)
    if size == 1:
        return []
    found = [Change(part="queries", way=way) for way in ("own", "not-own", "own-twice")]
    return found + [Change(part="queries", way="without-rank", number=number) for number in range(size)]


def weigh_queries(change: Change | None, chunks: Chunks, cell: Cell) -> Tensor:
    """Return how often each query (S) counts in the sums for the keys and values of a cell."""
    owner = chunks.owner
    if change is None:
        return torch.ones(len(owner), dtype=torch.float64)
    owners = set(owner[cell.positions].tolist())
    if len(owners) > 1:
        return torch.full((len(owner),), torch.nan, dtype=torch.float64)
    own = (owner == min(owners)).double()
    ways = {"own": own, "not-own": 1.0 - own, "own-twice": 1.0 + own}
    return ways[change.way] if change.way in ways else (owner != int(change.number or 0)).double()
