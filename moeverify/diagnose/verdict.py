"""What a test of a suspect says."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from moeverify.diagnose.cause import Cause


@dataclass(frozen=True)
class Verdict:
    """A named cause, a sentence for the reader, where it acts (an axis, a module, ranks), and the numbers."""

    cause: Cause
    sentence: str
    where: str = ""
    evidence: tuple[str, ...] = ()


def name_factor(factor: float, degrees: dict[str, int]) -> tuple[str, str]:
    """Return (text, axes) for a factor that may be a degree of the layout, its inverse, or a ratio of two.

    Several axes of one degree are all named: the numbers cannot tell them apart. Units: none.
    """
    if abs(factor) < 1e-9:
        return "0", ""
    sizes = {axis: size for axis, size in degrees.items() if size > 1}
    products = {axis: float(size) for axis, size in sizes.items()}
    for (first, size), (second, other) in itertools.permutations(sizes.items(), 2):
        products[f"{first} / {second}"] = size / other
        if first < second and {"efsdp", "edp"}.isdisjoint((first, second)):  # these are made of the others
            products[f"{first} * {second}"] = float(size * other)
    hits = [axis for axis, value in products.items() if _close(factor, value) and value != 1.0]
    inverse = [axis for axis, value in products.items() if _close(factor, 1.0 / value) and value != 1.0]
    plain = [axis for axis in hits if axis in sizes] or hits
    plain_inverse = [axis for axis in inverse if axis in sizes] or inverse
    if plain:
        return f"{factor:.6g} = {_either(plain)}", ", ".join(plain)
    if plain_inverse:
        return f"{factor:.6g} = 1 / ({_either(plain_inverse)})", ", ".join(plain_inverse)
    return f"{factor:.6g}", ""


def _either(axes: Sequence[str]) -> str:
    return axes[0] if len(axes) == 1 else " or ".join(axes) + " (of one size: this layout cannot tell)"


def _close(first: float, second: float) -> bool:
    return abs(first - second) <= 1e-6 * max(abs(first), abs(second))


def list_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3` or `ranks 0, 2`."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))
