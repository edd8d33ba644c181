"""Which initial values are a number of times the right ones that one rule gives, of each tensor's own shape.

A deviation by the fan-out where the fan-in is asked for makes some tensors too large and others too small. Each of
these factors alone is many a number of the run; one rule for all of them is hardly chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moeverify.diagnose.hypotheses.scaled_values import find_error, measure_scale
from moeverify.diagnose.weight_sizes import list_sizes
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.factor import Product

_FEWEST = 2
"""Other factors than the first that a rule must give."""


@dataclass(frozen=True)
class Measured:
    """A tensor that is `value` times the right one, up to a relative `error`, and the sizes of its dims."""

    tensor: WrongTensor
    value: float
    error: float
    sizes: dict[str, float]


@dataclass(frozen=True)
class ShapeRule:
    """A factor of each tensor, which is the `power`-th root of a product of its own sizes."""

    product: Product
    power: int

    def evaluate(self, sizes: dict[str, float]) -> float:
        """Return the factor of a tensor with these sizes."""
        value = 1.0
        for name in self.product.times:
            value *= sizes[name]
        for name in self.product.over:
            value /= sizes[name]
        return float(value ** (1.0 / self.power))

    def fits(self, measured: Measured) -> bool:
        """Return whether it gives a tensor's factor."""
        return abs(measured.value / self.evaluate(measured.sizes) - 1.0) <= measured.error


def measure_all(tensors: Sequence[WrongTensor]) -> list[Measured]:
    """Return the weights that are one number of times the right ones, with these numbers."""
    found = []
    for tensor in tensors:
        sizes, value = list_sizes(tensor.expected.shape), measure_scale([tensor])
        if sizes and value is not None:
            found.append(Measured(tensor, value, find_error([tensor]), sizes))
    return found


def find_rules(measured: Sequence[Measured]) -> tuple[list[ShapeRule], list[Measured]]:
    """Return the simplest rules that give the factors of the most tensors, and these; none where they may be chance.

    A rule must give several factors: of one alone, any size of the run may be the name.
    """
    best: list[Measured] = []
    rules: list[ShapeRule] = []
    for rule in _list_rules():
        given = [each for each in measured if rule.fits(each)]
        if len(given) < len(best) or not _has_several(given):
            continue
        if len(given) > len(best):
            best, rules = given, []
        if not rules or _count(rules[0]) == _count(rule):
            rules.append(rule)
    return rules, best


def _has_several(measured: Sequence[Measured]) -> bool:
    """Return whether there are two other factors than the first, or one and as many tensors of either."""
    first = measured[0].value if measured else 0.0
    others = [each for each in measured if abs(each.value / first - 1.0) > 2.0 * each.error]
    return len(others) >= _FEWEST and len(measured) - len(others) >= 1


def _count(rule: ShapeRule) -> int:
    return len(rule.product.sources)


def _list_rules() -> Iterator[ShapeRule]:
    """Yield one size, one over it, and quotients of two, and the roots of these: the simplest first."""
    names = list(list_sizes((1, 1)))
    products = [Product(times=(name,)) for name in names] + [Product(over=(name,)) for name in names]
    products += [Product(times=(one,), over=(other,)) for one in names for other in names if one != other]
    for product in products:
        for power in (2, 1):
            yield ShapeRule(product, power)
