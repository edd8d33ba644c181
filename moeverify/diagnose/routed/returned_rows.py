"""Which rows experts have returned for the copies of each token, told from their sum alone.

A token's output is the sum over its choices of weight times what an expert made of it. Where one choice or two came
back with another row, of whatever token and expert, that row is found among all that there are: for one by its value,
for two by a projection of their sum. So nothing needs to be known of how the rows travelled.

Letters: N tokens, k choices, H width, U rows that there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from moeverify.diagnose.layouts.token_sources import TokenIndex
from moeverify.diagnose.routed.experts import RoutedExperts

LOST = -1
_MOST_ROWS = 1 << 13  # that there are, of all tokens and experts
_MOST_WRONG = 512  # tokens: a pair of rows of each takes about a millisecond
_MOST_CHOICES = 4  # of a token, three of which may all be others
_FAR = 2  # rows beside the one that a projection is nearest to


@dataclass(frozen=True)
class ReturnedRows:
    """For each choice (N, k): the token of whose row something came back, and of which expert; `LOST` for zeros."""

    tokens: Tensor
    experts: Tensor


class ExpertRows:
    """All rows that experts could make of the tokens of a batch."""

    def __init__(self, experts: RoutedExperts) -> None:
        self.ids, self.weights = experts.ids, experts.weights
        self.count, self.num_tokens = experts.count, len(self.ids)
        self.is_small = self.num_tokens * experts.count < _MOST_ROWS
        self._experts = experts

    def find(self, actual: Tensor, expected: Tensor, exact: float) -> ReturnedRows | None:
        """Return what came back for the tokens of an output (N, H); None where that is not so of some token."""
        rows = self._experts.compute_rows().flatten(0, 1)
        own = torch.arange(self.num_tokens).unsqueeze(1) * self.count + self.ids
        found = RowFinder(rows, own, self.weights, self._list_some).find(actual, expected, exact)
        if found is None:
            return None
        found = self._prefer_own(found, rows)
        is_lost = found == LOST
        tokens, experts = found // self.count, found % self.count
        return ReturnedRows(tokens.masked_fill(is_lost, LOST), experts.masked_fill(is_lost, LOST))

    def _prefer_own(self, found: Tensor, rows: Tensor) -> Tensor:
        """Return the row of the token itself in the place of one that equals it: tokens may have a twin."""
        experts = found.clamp(min=0) % self.count
        own = torch.arange(self.num_tokens).unsqueeze(1) * self.count + experts
        is_same = (rows[found.clamp(min=0)] == rows[own]).all(dim=-1)
        return torch.where(is_same & (found != LOST), own, found)

    def _list_some(self, token: int, choice: int) -> Tensor:
        """Return the rows of a token by all experts, and those of all others by the expert of a choice."""
        by_token = token * self.count + torch.arange(self.count)
        by_expert = torch.arange(self.num_tokens) * self.count + self.ids[token, choice]
        return torch.cat([by_token, by_expert[torch.arange(self.num_tokens) != token]])


class RowFinder:
    """Rows (U, H) that there are, of which tokens should have those at `own` (N, k), summed by weights (N, k).

    `list_some` gives some rows for a token and a choice, for where three choices came back with others.
    """

    def __init__(
        self,
        rows: Tensor,
        own: Tensor,
        weights: Tensor,
        list_some: Callable[[int, int], Tensor] | None = None,
    ) -> None:
        self.rows = torch.cat([rows, torch.zeros_like(rows[:1])])  # the last one stands for what is lost
        self.own, self.weights, self._list_some = own, weights, list_some
        self._index = TokenIndex(self.rows)
        generator = torch.Generator().manual_seed(1)
        self._direction = torch.randn(self.rows.shape[1], dtype=self.rows.dtype, generator=generator)
        self._projected = self.rows @ self._direction
        self._sorted, self._order = self._projected.sort()

    def find(self, actual: Tensor, expected: Tensor, exact: float) -> Tensor | None:
        """Return the rows (N, k) of which an output (N, H) is made, `LOST` for zeros; None where it is not."""
        found = self.own.clone()
        allowed = exact * float(self.rows.abs().max())
        wrong = (
            ((actual - expected).abs().amax(dim=1) > exact * float(expected.abs().max())).nonzero().flatten()
        )
        if not 0 < len(wrong) <= _MOST_WRONG:
            return None
        lost = self._find_lost(actual[wrong], wrong, allowed)
        found[wrong] = torch.where(lost, len(self.rows) - 1, found[wrong])
        for token in wrong[~lost.any(dim=1)].tolist():
            left = actual[token] - expected[token]
            taken = self._find_one(token, left, allowed) or self._find_two(token, left, allowed)
            taken = taken or self._find_three(token, left, allowed)
            if taken is None:
                return None
            for choice, row in taken:
                found[token, choice] = row
        return found.masked_fill(found == len(self.rows) - 1, LOST)

    def _find_lost(self, actual: Tensor, tokens: Tensor, allowed: float) -> Tensor:
        """Return which choices (T, k) of tokens (T) are lost, where outputs (T, H) are right but for these.

        How often each row is there follows from the sum where a token has no more rows than numbers, so any of them
        may be lost at once. Of a token of which that is not so, none is.
        """
        weighted = self.weights[tokens].unsqueeze(-1) * self.rows[self.own[tokens]]
        if weighted.shape[1] > weighted.shape[2]:
            return torch.zeros(weighted.shape[:2], dtype=torch.bool)
        times = torch.linalg.lstsq(weighted.mT, actual.unsqueeze(-1), driver="gelsd").solution.squeeze(-1)
        is_lost: Tensor = times < 0.5
        made = (weighted * ~is_lost.unsqueeze(-1)).sum(dim=1)
        is_made = (made - actual).abs().amax(dim=1) <= allowed
        return is_lost & is_made.unsqueeze(1)

    def _find_one(self, token: int, left: Tensor, allowed: float) -> list[tuple[int, int]] | None:
        """Return the one choice that came back with another row, and that row."""
        weights = self.weights[token]
        wanted = self.rows[self.own[token]] + left / weights.unsqueeze(1)
        places = self._index.find(wanted, allowed / float(weights.min()))
        at = (places >= 0).nonzero().flatten().tolist()
        return [(at[0], int(places[at[0]]))] if len(at) == 1 else None

    def _find_two(self, token: int, left: Tensor, allowed: float) -> list[tuple[int, int]] | None:
        """Return the two choices that came back with other rows, and these rows; None where several do as well."""
        projected = self._projected
        found: list[list[tuple[int, int]]] = []
        for first, second in combinations(range(self.own.shape[1]), 2):
            one, two = self.weights[token, first], self.weights[token, second]
            total = left + one * self.rows[self.own[token, first]] + two * self.rows[self.own[token, second]]
            wanted = (total @ self._direction - one * projected) / two
            at = torch.searchsorted(self._sorted, wanted)
            for step in range(-_FAR, _FAR + 1):
                other = self._order[(at + step).clamp(0, len(self.rows) - 1)]
                near = (projected[other] - wanted).abs() <= allowed * len(self._direction) / float(two)
                for row in near.nonzero().flatten().tolist():
                    value = one * self.rows[row] + two * self.rows[other[row]]
                    if float((value - total).abs().max()) <= allowed:
                        found.append([(first, row), (second, int(other[row]))])
        return self._choose(found)

    def _find_three(self, token: int, left: Tensor, allowed: float) -> list[tuple[int, int]] | None:
        """Return the three choices that came back with other rows; None where several triples do as well.

        Each row is one of a few or is lost: all rows are too many.
        """
        if self._list_some is None or self.own.shape[1] > _MOST_CHOICES:
            return None
        lost = torch.tensor([len(self.rows) - 1])
        found: list[list[tuple[int, int]]] = []
        for choices in combinations(range(self.own.shape[1]), 3):
            weights = [self.weights[token, choice] for choice in choices]
            total = left + sum(
                (w * self.rows[self.own[token, choice]] for w, choice in zip(weights, choices, strict=True)),
                torch.zeros_like(left),
            )
            some = [torch.cat([self._list_some(token, choice), lost]) for choice in choices]
            one, two, three = (w * self._projected[rows] for w, rows in zip(weights, some, strict=True))
            wanted = total @ self._direction - one.unsqueeze(1) - two
            ordered, order = three.sort()
            at = torch.searchsorted(ordered, wanted.contiguous())
            for step in (-1, 0):
                last = order[(at + step).clamp(0, len(order) - 1)]
                near = (three[last] - wanted).abs() <= allowed * len(self._direction)
                for first, second in near.nonzero().tolist():
                    rows = [some[0][first], some[1][second], some[2][last[first, second]]]
                    value = sum((w * self.rows[row] for w, row in zip(weights, rows, strict=True)), -total)
                    if float(value.abs().max()) <= allowed:
                        found.append([(c, int(row)) for c, row in zip(choices, rows, strict=True)])
        return self._choose(found)

    def _choose(self, found: list[list[tuple[int, int]]]) -> list[tuple[int, int]] | None:
        """Return the one solution; of several that take equal rows the first, of others none."""
        if not found:
            return None
        values = [[(choice, self.rows[row]) for choice, row in each] for each in found]
        is_one = all(
            choice == first and torch.equal(value, right)
            for each in values
            for (choice, value), (first, right) in zip(each, values[0], strict=True)
        )
        return found[0] if is_one else None
