"""What a test of a suspect says."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moeverify.results.cause import Cause

_RATIO, _PRODUCT = " / ", " * "
_MADE_OF_OTHERS = {"efsdp", "edp"}


@dataclass(frozen=True)
class Verdict:
    """A named cause, a sentence for the reader, where it acts (an axis, a module, ranks), and the numbers.

    `axes` are the mesh axes, or products and ratios of them, that explain it equally well: more than one is an
    ambiguity that only another layout can end.
    """

    cause: Cause
    sentence: str
    where: str = ""
    evidence: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()


def name_factor(factor: float, degrees: Mapping[str, int]) -> tuple[str, tuple[str, ...]]:
    """Return (text, axes) for a factor that may be a degree of the layout, its inverse, or a ratio of two.

    Several axes of one degree are all named: the numbers cannot tell them apart. Units: none.
    """
    if abs(factor) < 1e-9:
        return "0", ()
    products = _multiply(degrees)
    for text, wanted in (("{}", factor), ("1 / ({})", 1.0 / factor)):
        hits = [axis for axis, value in products.items() if is_close(wanted, value) and value != 1.0]
        plain = [axis for axis in hits if axis in degrees] or hits
        if plain:
            return f"{factor:.6g} = {text.format(name_either(plain))}", tuple(plain)
    return f"{factor:.6g}", ()


def measure_axis(axis: str, degrees: Mapping[str, int]) -> float:
    """Return the size of what `name_factor` names: an axis, a product or a ratio; 1 for axes not in use."""
    first, *rest = (float(degrees.get(part, 1)) for part in split_axis(axis))
    if not rest:
        return first
    return first / rest[0] if _RATIO in axis else first * rest[0]


def split_axis(axis: str) -> list[str]:
    """Return the axes that a product or a ratio is made of."""
    return axis.split(_RATIO if _RATIO in axis else _PRODUCT)


def name_either(axes: Sequence[str]) -> str:
    """Return the axis, or all of several with a word that they cannot be told apart here."""
    return axes[0] if len(axes) == 1 else " or ".join(axes) + " (alike here: this layout cannot tell)"


def is_close(first: float, second: float) -> bool:
    """Return whether two factors are the same but for rounding."""
    return abs(first - second) <= 1e-6 * max(abs(first), abs(second))


def list_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3` or `ranks 0, 2`."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))


def _multiply(degrees: Mapping[str, int]) -> dict[str, float]:
    """Return the sizes of all axes, and of their products and ratios."""
    sizes = {axis: size for axis, size in degrees.items() if size > 1}
    products = {axis: float(size) for axis, size in sizes.items()}
    for (first, size), (second, other) in itertools.permutations(sizes.items(), 2):
        products[f"{first}{_RATIO}{second}"] = size / other
        if first < second and _MADE_OF_OTHERS.isdisjoint((first, second)):
            products[f"{first}{_PRODUCT}{second}"] = float(size * other)
    return products
