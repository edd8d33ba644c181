"""What a measured factor is of the numbers that a run has: sizes of its model, options of its recipe.

Any number is near to some product of many. So the candidates are few, from simple to complex, and a match counts only
where one of so many candidates is within the error of a factor by chance in less than one of a hundred cases. Numbers
that somebody writes, such as 0.5 or 0.1, are those of the run by chance more often: of these nothing is said but what
is expected of such a factor in the first place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from moeverify.axes.groups import BRANCHES, LAYERS
from moeverify.axes.named_numbers import LAYER
from moeverify.results.factor import Factor, Product

_CHANCE = 0.01
_SHORT = 1e-6
_WINDOW = 1.0
"""Logarithm of by how much candidates may differ to be counted as those around a factor, in both directions."""

_OF_QUOTIENTS = 3
_OF_DEPTH = (LAYERS, LAYER)
"""What no quotient with a width means anything of."""

_MOST_ALIKE = 2
"""More names for one number say nothing."""


@dataclass(frozen=True)
class NamedNumbers:
    """The `sizes` and the `options` that a factor may be made of, by their names."""

    sizes: Mapping[str, float] = field(default_factory=dict)
    options: Mapping[str, float] = field(default_factory=dict)

    def of(self, **sizes: float) -> NamedNumbers:
        """Return these with more sizes, such as those of one tensor."""
        return NamedNumbers({**self.sizes, **sizes}, self.options)


@dataclass(frozen=True)
class _Candidate:
    value: float
    product: Product
    power: int
    cost: int


def name_factor(
    value: float, numbers: NamedNumbers, *, error: float, first: Sequence[str] = ()
) -> Factor | None:
    """Return the factor with what it is of the numbers of the run; None where it is nothing, or may be by chance.

    `error` is how far it may be off, relatively. `first` are the names that are the simplest here.
    """
    if not value > 0.0 or not math.isfinite(value) or abs(value - 1.0) <= error:
        return None
    candidates = list(_list_candidates(numbers, first))
    hits = [each for each in candidates if abs(value / each.value - 1.0) <= error]
    if not hits:
        return None
    cost = min(each.cost for each in hits)
    near = {
        round(math.log(each.value), 9)
        for each in candidates
        if each.cost <= cost and abs(math.log(each.value / value)) <= _WINDOW
    }
    simplest = [each for each in hits if each.cost == cost]
    digits = 2 if cost == _OF_QUOTIENTS else 1
    if cost > 0 and any(is_short(value if each.product.times else 1.0 / value, digits) for each in simplest):
        return None
    if len(near) * 2.0 * error / (2.0 * _WINDOW) > _CHANCE or len(simplest) > _MOST_ALIKE:
        return None
    power = simplest[0].power
    equals = tuple(each.product for each in simplest if each.power == power)
    return Factor(value=simplest[0].value, power=power, equals=equals)


def list_expected(
    factor: Factor, numbers: NamedNumbers, first: Sequence[str], *, error: float
) -> tuple[Product, ...]:
    """Return the products of the simplest names that a factor equals as well as what it was said to be."""
    return tuple(
        each.product
        for each in _list_candidates(numbers, first)
        if each.power == factor.power
        and abs(factor.value / each.value - 1.0) <= error
        and set(each.product.sources) <= set(first)
    )


def is_short(value: float, digits: int = 1) -> bool:
    """Return whether a number has so many digits at most."""
    return abs(value / float(f"{value:.{digits}g}") - 1.0) <= _SHORT


def _list_candidates(numbers: NamedNumbers, first: Sequence[str]) -> Iterator[_Candidate]:
    """Yield sizes and options, one over them, their roots, and quotients of two sizes and the roots of these."""
    for names, values in ((numbers.sizes, numbers.sizes), (numbers.options, numbers.options)):
        is_option = values is numbers.options
        for name in names:
            cost = 0 if name in first else 2 if is_option else 1
            for power in (1,) if is_option else (1, 2):
                root = values[name] ** (1.0 / power)
                yield _Candidate(root, Product(times=(name,)), power, cost)
                yield _Candidate(1.0 / root, Product(over=(name,)), power, cost)
    for one, size in numbers.sizes.items():
        for other, divisor in numbers.sizes.items():
            if one == other or size == divisor or BRANCHES in (one, other):
                continue
            if (one in _OF_DEPTH) != (other in _OF_DEPTH):
                continue
            cost = 2 if one in first and other in first else _OF_QUOTIENTS
            for power in (1, 2):
                value = (size / divisor) ** (1.0 / power)
                yield _Candidate(value, Product(times=(one,), over=(other,)), power, cost)
