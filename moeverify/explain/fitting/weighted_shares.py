"""Weights of the shares of a batch that depend on the ranks' own numbers of valid tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from moeverify.explain.fitting.components import Components
from moeverify.explain.fitting.fit import Fit
from moeverify.results.factor import SAME
from moeverify.results.operation import OwnTokens
from moeverify.results.part import Contribution, Tokens

_COUNTS: Mapping[OwnTokens, Callable[[int, float, int], float]] = {
    "times": lambda own, mean, most: float(own),
    "divided": lambda own, mean, most: 1.0 / own,
    "share": lambda own, mean, most: own / mean,
    "of-largest": lambda own, mean, most: own / most,
    "largest-over": lambda own, mean, most: most / own,
    "root": lambda own, mean, most: math.sqrt(own / mean),
}


def find_own_tokens(weights: Sequence[float], counts: Sequence[int]) -> OwnTokens | None:
    """Return the formula that gives each share's weight from its number of valid tokens, or None.

    Every share needs a valid token, and at least two counts must differ: with equal counts, the weights are
    a common factor.
    """
    if len(set(counts)) < 2 or min(counts) < 1:
        return None
    mean = sum(counts) / len(counts)
    for name, formula in _COUNTS.items():
        wanted = [formula(own, mean, max(counts)) for own in counts]
        if all(abs(each - right) <= SAME * right for each, right in zip(weights, wanted, strict=True)):
            return name
    return None


def find_own_tokens_of_terms(
    wrong: Sequence[Contribution], fit: Fit, components: Components
) -> OwnTokens | None:
    """Return the formula that gives the weights of all wrong terms, if it is the same for all."""
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
