"""Whether numbers are drawn from a distribution: by all of them (Kolmogorov and Smirnov), and by the largest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeverify.results.initial_values import Distribution

_TERMS = 40
_SKEWED, _FEWEST = 1.3, 4096
"""The kurtosis of few numbers is skewed: nothing is said of less than so many, and it may be a third further off."""
_SMALL = 0.2
"""Below this the sum does not converge, and the chance is 1 to ten digits."""

NORMAL = 3.0
"""The kurtosis of normal numbers."""

Cdf = Callable[[Tensor], Tensor]


def _cdf_of_uniform(u: Tensor) -> Tensor:
    return ((u + 1.0) / 2.0).clamp(0.0, 1.0)


def _cdf_of_normal(u: Tensor) -> Tensor:
    return (1.0 + torch.erf(u / math.sqrt(2.0))) / 2.0


def _cdf_of_cut(u: Tensor, cut: float, unit: float) -> Tensor:
    inside = math.erf(cut / math.sqrt(2.0))
    return (torch.erf(u * unit / math.sqrt(2.0)) / inside + 1.0).clamp(0.0, 2.0) / 2.0


def measure_cut(cut: float) -> float:
    """Return the deviation of a standard normal number that is cut at so many deviations."""
    return math.sqrt(1.0 - 2.0 * cut * _measure_density(cut) / math.erf(cut / math.sqrt(2.0)))


def _measure_density(at: float) -> float:
    return math.exp(-at * at / 2.0) / math.sqrt(2.0 * math.pi)


@dataclass(frozen=True)
class Shape:
    """A distribution of numbers around zero in units of their size; `deviation` and `bound` are in these units.

    `kurtosis` is the mean of the fourth powers over the square of that of the squares.
    `at_bound` is the share of all numbers that are beyond a bound that is smaller by a small share, over that share.
    """

    cdf: Cdf
    deviation: float
    kurtosis: float
    bound: float = math.inf
    at_bound: float = 0.0


def _cut(cut: int, *, is_after: bool) -> Shape:
    unit = measure_cut(cut) if is_after else 1.0
    at_bound = 2.0 * cut * _measure_density(cut) / math.erf(cut / math.sqrt(2.0))
    fourth = 3.0 - 2.0 * (cut**3 + 3.0 * cut) * _measure_density(cut) / math.erf(cut / math.sqrt(2.0))
    deviation = measure_cut(cut)
    kurtosis = fourth / deviation**4
    return Shape(lambda u: _cdf_of_cut(u, cut, unit), deviation / unit, kurtosis, cut / unit, at_bound)


# By (distribution, where it is cut, whether its deviation is that after the cut).
SHAPES: Mapping[tuple[Distribution, int, bool], Shape] = {
    ("uniform", 0, False): Shape(_cdf_of_uniform, 1.0 / math.sqrt(3.0), 1.8, 1.0, 1.0),
    ("normal", 0, False): Shape(_cdf_of_normal, 1.0, NORMAL),
    **{("normal", cut, after): _cut(cut, is_after=after) for cut in (2, 3) for after in (False, True)},
}


def find_chance(values: Tensor, shape: Shape, count: int, error: float) -> float:
    """Return how likely it is that numbers of a distribution differ from it as much as these.

    `values` are a sample of `count` numbers, with the largest ones among them, in units of the distribution, each up
    to a relative `error`.
    """
    largest = float(values.abs().max())
    if largest > shape.bound * (1.0 + error):
        return 0.0
    beyond = float(2.0 * (1.0 - shape.cdf(torch.tensor(largest, dtype=torch.float64))))
    # What the largest of so many is at most, and at least.
    below = math.exp(count * math.log1p(-min(beyond, 1.0 - 1e-16)))
    above = 1.0 - below if beyond > 0.0 else 1.0
    tails = compare_tails(values, shape.kurtosis) if math.isinf(shape.bound) else 1.0
    return min(_compare(values, shape.cdf), below, above, tails)


def _compare(values: Tensor, cdf: Cdf) -> float:
    ordered = cdf(values.sort().values)
    places = torch.arange(len(ordered) + 1, dtype=torch.float64) / len(ordered)
    distance = max(float((places[1:] - ordered).max()), float((ordered - places[:-1]).max()))
    return _tail(distance, len(ordered))


def compare_samples(one: Tensor, other: Tensor) -> float:
    """Return how likely two samples of as many numbers of one distribution are as far apart as these."""
    both = torch.cat([one, other])
    first, second = one.sort().values, other.sort().values
    distance = (
        torch.searchsorted(first, both, right=True) - torch.searchsorted(second, both, right=True)
    ).abs()
    return _tail(float(distance.max()) / len(one), len(one) / 2.0)


def _tail(distance: float, count: float) -> float:
    root = math.sqrt(count)
    scaled = distance * (root + 0.12 + 0.11 / root)
    if scaled < _SMALL:
        return 1.0
    terms = [2.0 * (-1) ** (k - 1) * math.exp(-2.0 * k * k * scaled * scaled) for k in range(1, _TERMS)]
    return float(min(max(sum(terms), 0.0), 1.0))


def compare_deviations(ratios: Sequence[float], counts: Sequence[int], kurtosis: float) -> float:
    """Return how likely deviations of so many numbers each are as far from the right ones as these ratios.

    Of all numbers together the larger ones make up for the smaller.
    """
    squares = [
        (ratio - 1.0) ** 2 * 4.0 * count / (kurtosis - 1.0)
        for ratio, count in zip(ratios, counts, strict=True)
    ]
    halves = (torch.tensor(each / 2.0, dtype=torch.float64) for each in (len(squares), sum(squares)))
    return float(torch.special.gammaincc(*halves))


def compare_tails(values: Tensor, kurtosis: float, count: float | None = None) -> float:
    """Return how likely the kurtosis of normal numbers is as far off.

    `count` is that of the numbers, where what they are compared with is measured too.
    """
    if len(values) < _FEWEST:
        return 1.0
    measured = measure_kurtosis(values)
    spread = _SKEWED * math.sqrt(24.0 / (len(values) if count is None else count))
    return math.erfc(abs(measured - kurtosis) / spread / math.sqrt(2.0))


def measure_kurtosis(values: Tensor) -> float:
    """Return the mean of the fourth powers over the square of that of the squares, around zero."""
    squares = values.square()
    return float(squares.square().mean() / squares.mean().square())
