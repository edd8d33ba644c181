"""Initial values of which only the largest are others: cut off, drawn again or zero, as of a truncated distribution.

Such values are the right ones in most places, so that they are compared element by element: no distribution is
estimated. What is beyond must be just the largest of the right values of each weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.initial_values import Tails

_DEVIATIONS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0)
_CHANCE = 1e-8
"""By lot the elements that are others would be the largest ones of each weight less often than this."""

_MOST_BEYOND = 0.5
_NOISE, _SAME = 5.0, 1e-3
_FEW = 2
"""So many values may be at one bound by chance, as 16 bits round them."""

_Way = Literal["drawn-again", "cut-off", "zero"]

_UNITS = 2.0
"""Units of rounding by which a value is the same."""


class _Split(NamedTuple):
    """Values of a weight within a bound and beyond, right ones and `found`; `factor` is that of those within."""

    within: Tensor
    beyond: Tensor
    found: Tensor
    factor: float
    error: float

    @property
    def deviation(self) -> float:
        return float(torch.cat([self.within, self.beyond]).square().mean().sqrt())

    @property
    def noise(self) -> float:
        """Return by how much, relatively, the deviation may be off."""
        return _NOISE / math.sqrt(2.0 * (len(self.within) + len(self.beyond)))

    @property
    def edges(self) -> tuple[float, float]:
        """Return between which right values the bound is."""
        return float(self.within.abs().max()), float(self.beyond.abs().min())


def find_tails(tensors: Sequence[WrongTensor]) -> Tails | None:
    """Return what the largest values of all weights are, where all others are right; None where that is not so."""
    splits = [_split(tensor) for tensor in tensors]
    known = [each for each in splits if each is not None]
    if not known or len(known) < len(splits) or sum(map(_measure_chance, known)) > math.log(_CHANCE):
        return None
    factors = [each.factor for each in known]
    ways = set.intersection(*(set(_list_ways(each)) for each in known))
    if max(factors) - min(factors) > _SAME * max(factors) or len(ways) != 1:
        return None
    if ways == {"drawn-again"} and not _are_independent(known):
        return None
    deviations = [number for number in _DEVIATIONS if all(_is_at(number, each) for each in known)]
    least, most = max(each.edges[0] for each in known), min(each.edges[1] for each in known)
    return Tails(
        way=ways.pop(),
        deviations=deviations[0] if len(deviations) == 1 else None,
        bound=(least + most) / 2.0 if not deviations and least < most else None,
        factor=factors[0],
        num_beyond=sum(len(each.beyond) for each in known),
        num_elements=sum(len(each.within) + len(each.beyond) for each in known),
    )


def _split(tensor: WrongTensor) -> _Split | None:
    """Return the values of a weight within and beyond a bound that parts right ones from others, if one does."""
    right, found = tensor.expected.reshape(-1), tensor.whole.reshape(-1)
    error = _UNITS * float(torch.finfo(tensor.precision).eps)
    if not bool(found.isfinite().all()) or not bool(right.any()):
        return None
    for factor in _list_factors(right, found):
        is_right = (found - factor * right).abs() <= error * (factor * right).abs()
        if bool(is_right.all()) or float((~is_right).double().mean()) > _MOST_BEYOND:
            continue
        split = _Split(right[is_right], right[~is_right], found[~is_right], factor, error)
        if split.edges[0] < split.edges[1]:
            return split
    return None


def _list_factors(right: Tensor, found: Tensor) -> Iterator[float]:
    yield 1.0
    size = right.abs()
    some = (size < size.median()) & (size > 0.0)
    if bool(some.any()):
        yield float((found[some] / right[some]).median())


def _measure_chance(split: _Split) -> float:
    """Return the logarithm of the chance that so many elements, drawn by lot, are the largest ones."""
    few, count = len(split.beyond), len(split.beyond) + len(split.within)
    return math.lgamma(few + 1) + math.lgamma(count - few + 1) - math.lgamma(count + 1)


def _list_ways(split: _Split) -> Sequence[_Way]:
    """Return what the values beyond a bound may be; a single one may be at the bound by chance."""
    found, bound = split.found.abs(), split.factor * split.edges[1] * (1.0 + split.error)
    if not bool(found.any()):
        return ("zero",)
    if float(found.max()) > bound:
        return ()
    is_one = bool((found - found[0]).abs().max() <= split.error * found[0])
    if is_one and bool((split.found * split.beyond > 0.0).all()):
        return ("cut-off",) if len(found) > _FEW else ("cut-off", "drawn-again")
    return ("drawn-again",)


def _are_independent(splits: Sequence[_Split]) -> bool:
    """Return whether values that are drawn again have nothing of those in whose place they stand."""
    right = torch.cat([each.beyond / each.deviation for each in splits])
    found = torch.cat([each.found / each.deviation for each in splits])
    cosine = float(right @ found) / float(right.norm() * found.norm())
    return abs(cosine) <= _NOISE / math.sqrt(len(right)) and bool(found.all())


def _is_at(number: float, split: _Split) -> bool:
    least, most = (each / split.deviation for each in split.edges)
    return least * (1.0 - split.noise) <= number <= most * (1.0 + split.noise)
