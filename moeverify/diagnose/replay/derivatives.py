"""The derivative of an activation x * g(x), which is g(x) + x * g'(x): a sum of two products, one of them otherwise.

Of silu g is the sigmoid s and g' is s * (1 - s); of gelu g is the normal distribution c and g' its density p. Whoever
writes such a sum by hand leaves out a factor, has one twice, another one in its place, or another sign.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import product

import torch
from torch import Tensor

from moeverify.results.change import Change

Factors = Mapping[str, Callable[[Tensor], Tensor]]
_ONE: Mapping[str, int] = {}

_FACTORS: Mapping[str, Factors] = {
    "silu": {
        "x": lambda x: x,
        "s": torch.sigmoid,
        "(1-s)": lambda x: 1.0 - x.sigmoid(),
        "(1+s)": lambda x: 1.0 + x.sigmoid(),
    },
    "gelu": {
        "x": lambda x: x,
        "c": torch.special.ndtr,
        "p": lambda x: torch.exp(-0.5 * x.square()) / math.sqrt(2.0 * math.pi),
        "(1-c)": lambda x: 1.0 - torch.special.ndtr(x),
    },
}
_RIGHT: Mapping[str, tuple[Mapping[str, int], Mapping[str, int]]] = {
    "silu": ({"s": 1}, {"x": 1, "s": 1, "(1-s)": 1}),
    "gelu": ({"c": 1}, {"x": 1, "p": 1}),
}
_MOST: Mapping[str, tuple[Mapping[str, int], Mapping[str, int]]] = {
    "silu": ({"x": 1, "s": 2, "(1-s)": 1}, {"x": 2, "s": 2, "(1-s)": 2, "(1+s)": 1}),
    "gelu": ({"x": 1, "c": 2, "p": 1, "(1-c)": 1}, {"x": 2, "c": 1, "p": 2}),
}
"""How often each factor may be there, in the first product and in the second."""

_TIMES = (1.0, -1.0)

OF_SUM: Mapping[str, tuple[str, int]] = {
    "first-of-silu": ("silu", 0),
    "second-of-silu": ("silu", 1),
    "first-of-gelu": ("gelu", 0),
    "second-of-gelu": ("gelu", 1),
}
"""The ways in which one product is otherwise, with the activation and which of its two."""


def list_sums(activation: str) -> list[Change]:
    """Return how one of the two products may be otherwise, with its factors for the name and a sign."""
    found = []
    for which, (name_of_it, number_of_it) in OF_SUM.items():
        if name_of_it != activation:
            continue
        right, most = _RIGHT[activation][number_of_it], _MOST[activation][number_of_it]
        found.append(Change(part="derivative", way=which, number=0.0))
        names = list(most)
        for powers in product(*(range(count + 1) for count in most.values())):
            factors = {name: power for name, power in zip(names, powers, strict=True) if power}
            numbers = [number for number in _TIMES if (factors, number) != (right, 1.0)]
            text = _spell(factors)
            found += [Change(part="derivative", way=which, number=number, name=text) for number in numbers]
        found.append(Change(part="derivative", way=which, number=2.0, name=_spell(right)))
    return found


def differentiate_otherwise(x: Tensor, change: Change) -> Tensor:
    """Return the derivative at x (..., F), the sum of the right product and the other one."""
    activation, which = OF_SUM[change.way]
    other = float(change.number or 0.0) * _multiply(x, activation, _find_factors(change))
    return other + _multiply(x, activation, _RIGHT[activation][1 - which])


def _find_factors(change: Change) -> Mapping[str, int]:
    activation, which = OF_SUM[change.way]
    most = _MOST[activation][which]
    names = list(most)
    for powers in product(*(range(count + 1) for count in most.values())):
        factors = {name: power for name, power in zip(names, powers, strict=True) if power}
        if _spell(factors) == change.name:
            return factors
    return _ONE


def _spell(factors: Mapping[str, int]) -> str:
    return "*".join(name for name, power in factors.items() for _ in range(power)) or "1"


def _multiply(x: Tensor, activation: str, factors: Mapping[str, int]) -> Tensor:
    found = torch.ones_like(x)
    for name, power in factors.items():
        found = found * _FACTORS[activation][name](x) ** power
    return found
