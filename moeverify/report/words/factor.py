"""Factors in words: `2x too large; 2 = ep = efsdp (ambiguous in this layout)`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from moeverify.results.factor import Factor, Product

AMBIGUOUS = "(ambiguous in this layout)"
NO_COUNT = "which is no count of this layout"
_MOST_DIGITS = 17
# Roots of integers up to this (a width, a number of layers) do not match by chance to within `_KNOWN`.
_LARGEST_ROOT = 1 << 14
_KNOWN = 1e-9

# Origins of a factor that are not mesh axes: groups of ranks, counts, recipe options.
_NO_AXES: Mapping[str, str] = {
    "all ranks": "all ranks",
    "ranks": "all ranks",
    "all data ranks": "all data ranks",
    "top_k": "top_k",
    **{
        count: f"number of {count}"
        for count in (
            "micro-batches",
            "uses of the tied weight",
            "rows of the batch",
            "positions of a row",
            "tokens of the batch",
            "valid tokens of the batch",
            "MoE layers",
            "layers",
            "experts",
            "heads",
            "key-value heads",
        )
    },
}


def format_factor(value: float) -> str:
    """Return a factor to six digits, or more if necessary to distinguish it from 1."""
    text = f"{value:.6g}"
    digits = 6
    while float(text) == 1.0 and value != 1.0 and digits < _MOST_DIGITS:
        digits += 1
        text = f"{value:.{digits}g}"
    return text


def name_number(value: float) -> str:
    """Return a closed form of a number that is not a count: `the root of 32`, `1/0.9`; empty if unknown."""
    square = value * value
    for text, number in (("the root of {}", square), ("1/root of {}", 1.0 / square if square else 0.0)):
        whole = round(number)
        if 1 < whole <= _LARGEST_ROOT and _is_known(number, whole) and math.isqrt(whole) ** 2 != whole:
            return text.format(whole)
    for base in (2, 10):
        for text, number in ((f"log({base})", math.log(base)), (f"1/log({base})", 1.0 / math.log(base))):
            if _is_known(value, number):
                return text
    inverse = float(f"{1.0 / value:.3g}") if value else 0.0
    is_short = _is_known(value, float(f"{value:.4g}"))
    return f"1/{inverse:g}" if inverse and not is_short and _is_known(value * inverse, 1.0) else ""


def _is_known(value: float, number: float) -> bool:
    return abs(value - number) <= _KNOWN * abs(number)


def describe_no_count(value: float) -> str:
    """Return a note that a number is not a count of the layout, with its closed form if known."""
    name = name_number(value)
    return f"{name}, {NO_COUNT}" if name else NO_COUNT


def name_product(product: Product) -> str:
    """Return a product in words: `ep`, `1/ep`, `ep * cp`, `ep/cp`, `1/(ep * cp)`."""
    times = " * ".join(product.times)
    if not product.over:
        return times
    over = " * ".join(product.over)
    over = f"({over})" if len(product.over) > 1 else over
    return f"{times or '1'}/{over}"


def name_products(products: Sequence[Product]) -> str:
    """Return the products joined by `or`: `tp or ep (ambiguous in this layout)`."""
    names = " or ".join(name_product(product) for product in products)
    return names if len(products) < 2 else f"{names} {AMBIGUOUS}"


def part_sources(sources: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the mesh axes among the sources of a factor, and the names of the other sources."""
    axes = [source for source in sources if source not in _NO_AXES]
    return axes, [_NO_AXES[source] for source in sources if source in _NO_AXES]


def name_sources(sources: Sequence[str]) -> str:
    """Return the possible sources of a factor, mesh axes first: `axis pp, ep, number of micro-batches`."""
    axes, others = part_sources(sources)
    return ", ".join([f"axis {', '.join(axes)}", *others] if axes else others)


def describe_amount(factor: Factor) -> str:
    """Return the size of an error in words: `2x too large`, `0.5x the expected value`, `missing`."""
    if not math.isfinite(factor.value):
        return "no number"
    if factor.is_zero:
        return "missing"
    if factor.value > 1.0:
        return f"{format_factor(factor.value)}x too large"
    return f"{format_factor(factor.value)}x the expected value"


def describe_sources(factor: Factor) -> str:
    """Return the products that equal the factor, `2 = ep`, or an empty string."""
    if not factor.equals:
        return ""
    value = format_factor(factor.value**factor.power)
    text = " = ".join([value, *(name_product(product) for product in factor.equals)])
    head = "squared: " if factor.power == 2 else ""
    return f"{head}{text}" + (f" {AMBIGUOUS}" if len(factor.equals) > 1 else "")


def describe_factor(factor: Factor, *, is_estimate: bool = False) -> str:
    """Return the amount and its sources: `2x too large; 2 = ep`; estimates without sources get two digits."""
    if is_estimate and not factor.equals and not factor.is_zero:
        return f"about {factor.value:.2g}x the expected value"
    sources = describe_sources(factor)
    return describe_amount(factor) + (f"; {sources}" if sources else "")
