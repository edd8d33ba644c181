"""Where the weights of the batch's shares come from: means of means, the ranks' own tokens, clips on the way.

A wrong gradient that is a sum of right parts tells the weight of each share, to ten digits in float64. These are
compared with the weights that a whole procedure gives, so that nothing is said of one number alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from moeverify.diagnose.components import Components
from moeverify.diagnose.fit import Fit
from moeverify.results.factor import SAME, is_same
from moeverify.results.operation import ByNumber, OwnTokens, PartialClip
from moeverify.results.part import Contribution, Tokens
from moeverify.train.clipping import GUARD

_COUNTS: Mapping[OwnTokens, Callable[[int, float, int], float]] = {
    "times": lambda own, mean, most: float(own),
    "divided": lambda own, mean, most: 1.0 / own,
    "share": lambda own, mean, most: own / mean,
    "of-largest": lambda own, mean, most: own / most,
    "largest-over": lambda own, mean, most: most / own,
    "root": lambda own, mean, most: math.sqrt(own / mean),
}


def find_own_tokens(
    weights: Sequence[float], counts: Sequence[int], *, noise: float = SAME
) -> OwnTokens | None:
    """Return what weights are of the number of valid tokens of the share that has each; None where they are none.

    Each share has some tokens, and two have other numbers: equal ones are a factor like any other. A weight may be
    off by `noise`, relatively.
    """
    if len(set(counts)) < 2 or min(counts) < 1:
        return None
    mean = sum(counts) / len(counts)
    for name, formula in _COUNTS.items():
        wanted = [formula(own, mean, max(counts)) for own in counts]
        if all(abs(each - right) <= noise * right for each, right in zip(weights, wanted, strict=True)):
            return name
    return None


def find_own_tokens_of_terms(
    wrong: Sequence[Contribution], fit: Fit, components: Components
) -> OwnTokens | None:
    """Return what the weights of all wrong terms are of the shares' valid tokens, where it is one and the same."""
    found: set[OwnTokens | None] = set()
    for term in {each.part.term for each in wrong}:
        weights = _weights_of(fit, term)
        known = [
            (weights[cell.tokens], count)
            for cell, count in zip(components.cells, components.num_valid, strict=True)
            if cell.tokens in weights and count
        ]
        found.add(find_own_tokens([weight for weight, _ in known], [count for _, count in known]))
    return found.pop() if len(found) == 1 else None


def _weights_of(fit: Fit, term: str) -> dict[Tokens | None, float]:
    pairs = zip(fit.parts, fit.coefficients, strict=True)
    return {part.tokens: value for part, value in pairs if part.term == term}


_LEAST_NUMBERS = 3
"""Of two micro-batches any weights are powers of some ratio."""


def find_by_number(fit: Fit, components: Components) -> ByNumber | None:
    """Return what the weights of micro-batches are of their numbers, the same on all ranks; None where nothing."""
    weights = _weights_of(fit, "")
    found: dict[int, float] = {}
    for cell in components.cells:
        number, weight = cell.tokens.micro_batch, weights.get(cell.tokens)
        if number is None or weight is None or not is_same(found.setdefault(number, weight), weight):
            return None
    values = [found[number] for number in sorted(found)]
    if len(values) < _LEAST_NUMBERS or not all(value > 0.0 for value in values):
        return None
    ratio = values[0] / values[1]
    known = {
        ByNumber(way="divided"): [1.0 / (1 + number) for number in range(len(values))],
        ByNumber(way="times"): [1.0 + number for number in range(len(values))],
        ByNumber(way="decaying", ratio=ratio): [ratio**number for number in reversed(range(len(values)))],
        ByNumber(way="falling", ratio=1.0 / ratio): [ratio**-number for number in range(len(values))],
    }
    for way, wanted in known.items():
        is_it = all(is_same(value, right) for value, right in zip(values, wanted, strict=True))
        if is_it and not is_same(ratio, 1.0):
            return way
    return None


@dataclass(frozen=True)
class _Shares:
    """The ranks of the loss and micro-batches by cell, and the products (N, N) of the cells' gradients."""

    ranks: Sequence[tuple[int | None, int | None]]
    numbers: Sequence[int]
    products: Tensor

    @classmethod
    def of(cls, components: Components) -> _Shares:
        """Return those of a step: the products over all parameters."""
        cells = components.cells
        products = torch.zeros(len(cells), len(cells), dtype=torch.float64)
        for name in components.names:
            rows = [components.share(number, name).reshape(-1) for number in range(len(cells))]
            stacked = torch.stack(rows).to("cpu", torch.float64)
            products += stacked @ stacked.T
        ranks = [(cell.tokens.data_rank, cell.tokens.context_rank) for cell in cells]
        return cls(ranks, [cell.tokens.micro_batch or 0 for cell in cells], products)

    def measure(self, weights: Tensor) -> float:
        """Return the norm of the sum of the gradients with these weights (N)."""
        return math.sqrt(max(float(weights @ self.products @ weights), 0.0))


def find_partial_clip(fit: Fit, components: Components, max_norm: float | None) -> PartialClip | None:
    """Return how gradients are clipped before all micro-batches of all ranks are summed; None where they are not.

    What is clipped after each micro-batch is what has been accumulated, or the micro-batch alone; by the norm of all
    ranks or of each rank's own; with or without the last one. A rank's own gradient is that of the averaged loss, or
    as many times that as there are ranks. One way fits: several that give the same weights name none.
    """
    weights = _weights_of(fit, "")
    cells = components.cells
    known = [number for number, cell in enumerate(cells) if cell.tokens in weights]
    if max_norm is None or len(known) < 2 or len(known) < len(cells) - components.num_valid.count(0):
        return None
    actual = [weights[cells[number].tokens] for number in known]
    if all(is_same(each, actual[0]) for each in actual):
        return None
    found: dict[PartialClip, None] = {}
    for way, expected in _list_clips(_Shares.of(components), max_norm):
        if all(is_same(value, expected[number]) for value, number in zip(actual, known, strict=True)):
            found[way] = None
    return next(iter(found)) if len(found) == 1 else None


def _list_clips(shares: _Shares, max_norm: float) -> Iterator[tuple[PartialClip, list[float]]]:
    """Yield each way to clip, with the weights (N) that it gives the cells."""
    num_ranks = len(set(shares.ranks))
    has_several = max(shares.numbers) > 0
    scales = [(False, 1.0), (True, 1.0), (True, float(num_ranks))]
    for (by_own, scale), is_last, is_sum in product(scales, (False, True), (True, False)):
        weights = _clip_shares(shares, max_norm, scale, by_own=by_own, is_last=is_last, is_sum=is_sum)
        clipped: Literal["accumulated", "micro-batch"] = (
            "accumulated" if is_sum and has_several else "micro-batch"
        )
        yield PartialClip(clipped=clipped, by_own=by_own), weights.tolist()


def _clip_shares(
    shares: _Shares, max_norm: float, scale: float, *, by_own: bool, is_last: bool, is_sum: bool
) -> Tensor:
    """Return the weights (N) of the cells after each micro-batch has been clipped, the last one if asked."""
    ranks = list(dict.fromkeys(shares.ranks))
    groups = [[rank] for rank in ranks] if by_own else [ranks]
    last = max(shares.numbers)
    weights = torch.zeros(len(shares.ranks), dtype=torch.float64)
    for number in range(last + 1):
        weights += torch.tensor([float(each == number) for each in shares.numbers], dtype=torch.float64)
        if number == last and not is_last:
            break
        for group in groups:
            inside = torch.tensor(
                [
                    rank in group and (is_sum or each == number)
                    for rank, each in zip(shares.ranks, shares.numbers, strict=True)
                ]
            )
            norm = scale * shares.measure(torch.where(inside, weights, 0.0))
            weights = torch.where(inside, min(1.0, max_norm / (norm + GUARD)) * weights, weights)
    return weights
