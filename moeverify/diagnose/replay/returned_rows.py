"""Which rows experts have returned for the copies of each token, told from their sum alone.

A token's output is the sum over its choices of weight times what an expert made of it. Where one choice or two came
back with another row, of whatever token and expert, that row is found among all that there are: for one by its value,
for two by a projection of their sum. So nothing needs to be known of how the rows travelled.

Letters: N tokens, k choices, H width, U rows that there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from moeverify.diagnose.layouts.token_sources import TokenIndex
from moeverify.diagnose.replay.experts import ExpertsFormula

LOST = -1
_MOST_ROWS = 1 << 13  # that there are, of all tokens and experts
_MOST_WRONG = 512  # tokens: a pair of rows of each takes about a millisecond
_FAR = 2  # rows beside the one that a projection is nearest to


@dataclass(frozen=True)
class ReturnedRows:
    """For each choice (N, k): the token of whose row something came back, and of which expert; `LOST` for zeros."""

    tokens: Tensor
    experts: Tensor


class RowFinder:
    """All rows that experts could make of the tokens of a batch."""

    def __init__(self, formula: ExpertsFormula) -> None:
        x, ids, weights = (each.flatten(0, 1) for each in (formula.x, formula.ids, formula.weights))
        self.ids, self.weights, self.count = ids, weights, formula.count
        self.num_tokens = len(x)
        self.is_small = len(x) * formula.count < _MOST_ROWS
        if not self.is_small:
            return
        everything = torch.arange(formula.count).expand(*formula.ids.shape[:2], formula.count)
        with torch.no_grad():
            made = formula.list_outputs(everything).flatten(0, 2)
        self.rows = torch.cat([made, torch.zeros_like(made[:1])])  # the last one stands for what is lost
        self._index = TokenIndex(self.rows)
        generator = torch.Generator().manual_seed(1)
        self._direction = torch.randn(self.rows.shape[1], dtype=self.rows.dtype, generator=generator)
        self._sorted, self._order = (self.rows @ self._direction).sort()

    def find(self, actual: Tensor, expected: Tensor, exact: float) -> ReturnedRows | None:
        """Return what came back for the tokens of an output (N, H); None where that is not so of some token."""
        own = torch.arange(self.num_tokens).unsqueeze(1) * self.count + self.ids
        found = own.clone()
        allowed = exact * float(self.rows.abs().max())
        wrong = (
            ((actual - expected).abs().amax(dim=1) > exact * float(expected.abs().max())).nonzero().flatten()
        )
        if not 0 < len(wrong) <= _MOST_WRONG:
            return None
        for token in wrong.tolist():
            left = actual[token] - expected[token]
            taken = self._find_one(token, own, left, allowed) or self._find_two(token, own, left, allowed)
            if taken is None:
                return None
            for choice, row in taken:
                found[token, choice] = row
        is_lost = found == len(self.rows) - 1
        tokens, experts = found // self.count, found % self.count
        return ReturnedRows(tokens.masked_fill(is_lost, LOST), experts.masked_fill(is_lost, LOST))

    def _find_one(
        self, token: int, own: Tensor, left: Tensor, allowed: float
    ) -> list[tuple[int, int]] | None:
        """Return the one choice that came back with another row, and that row."""
        weights = self.weights[token]
        wanted = self.rows[own[token]] + left / weights.unsqueeze(1)
        places = self._index.find(wanted, allowed / float(weights.min()))
        at = (places >= 0).nonzero().flatten().tolist()
        return [(at[0], int(places[at[0]]))] if len(at) == 1 else None

    def _find_two(
        self, token: int, own: Tensor, left: Tensor, allowed: float
    ) -> list[tuple[int, int]] | None:
        """Return the two choices that came back with other rows, and these rows; None where several do as well."""
        projected = self.rows @ self._direction
        found: list[list[tuple[int, int]]] = []
        for first, second in combinations(range(self.ids.shape[1]), 2):
            one, two = self.weights[token, first], self.weights[token, second]
            total = left + one * self.rows[own[token, first]] + two * self.rows[own[token, second]]
            wanted = (total @ self._direction - one * projected) / two
            at = torch.searchsorted(self._sorted, wanted)
            for step in range(-_FAR, _FAR + 1):
                other = self._order[(at + step).clamp(0, len(self.rows) - 1)]
                near = (projected[other] - wanted).abs() <= allowed * len(self._direction) / float(two)
                for row in near.nonzero().flatten().tolist():
                    value = one * self.rows[row] + two * self.rows[other[row]]
                    if float((value - total).abs().max()) <= allowed:
                        found.append([(first, row), (second, int(other[row]))])
        return found[0] if found and all(each == found[0] for each in found) else None
