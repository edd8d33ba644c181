"""What an embedding puts out: a row of its weight for each token.

Letters: b rows and s tokens of what is asked for, B and S of the batch, V rows of the weight, H its width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from moeverify.diagnose.replay.grammar import fit_functions, list_functions, pass_through, times_of
from moeverify.diagnose.replay.language import Cell, Formula
from moeverify.diagnose.replay.tokenwise import pick_dims
from moeverify.results.change import Change

_MOST_ROWS = 256  # that are looked at as the one without a value
_WAVELENGTH = 1e4


class EmbeddingFormula(Formula):
    """weight[tokens], with rows of other tokens, without some, scaled, or with positions added."""

    alone = frozenset({"output-through", "row"})

    def __init__(self, module: nn.Embedding, tokens: Tensor) -> None:
        self.weight, self.tokens = module.weight.detach(), tokens
        count = len(self.weight)
        shifts = sorted({1, -1, 2, -2, count // 2, -(count // 2)})
        self.ways = [Change(part="rows", way="shifted", number=number) for number in shifts if number]
        self.ways += [Change(part="rows", way="reversed")]
        self.ways += [Change(part="input", way="of-position", number=number) for number in (1, -1)]
        self.ways += [Change(part="input", way="of-row", number=number) for number in (1, -1)]
        seen = torch.unique(tokens).tolist()[:_MOST_ROWS]
        self.ways += [Change(part="row", way="zero", number=number) for number in seen]
        self.ways += [Change(part="positions", way=way) for way in ("sinusoids", "sinusoids-in-turn")]
        self.ways += list_functions("output-through")
        self.fits = fit_functions("output-through")
        self.fits += [Change(part="positions", way="numbers", number=0.1)]

    def evaluate(self, cell: Cell, changes: Mapping[str, Change]) -> Tensor:
        """Return the output at a cell."""
        tokens, change = self.tokens, changes.get("input")
        if change is not None:
            dim = 0 if change.way == "of-row" else 1
            tokens = tokens.roll(-int(change.number or 0), dim)
        tokens = tokens[cell.rows][:, cell.positions]
        rows, count = changes.get("rows"), len(self.weight)
        if rows is not None:
            shifted = (tokens + int(rows.number or 0)) % count
            tokens = count - 1 - tokens if rows.way == "reversed" else shifted
        found = self.weight[tokens]
        if "row" in changes:
            found = found * (tokens != int(changes["row"].number or 0)).to(found.dtype).unsqueeze(-1)
        found = pass_through(found, changes.get("output-through"))
        if "positions" in changes:
            found = found + self._place(cell.positions, changes["positions"])
        return pick_dims(found, cell)

    def _place(self, positions: Tensor, change: Change) -> Tensor:
        """Return what stands for the positions (s): (s, H)."""
        width, at = self.weight.shape[1], positions.to(self.weight.dtype).unsqueeze(-1)
        if change.way == "numbers":
            return at * times_of(change)
        angles = at * _WAVELENGTH ** -(torch.arange(0, width, 2, dtype=at.dtype) / width)
        parts = [angles.sin(), angles.cos()]
        return (
            torch.stack(parts, dim=-1).flatten(-2) if change.way.endswith("in-turn") else torch.cat(parts, -1)
        )
