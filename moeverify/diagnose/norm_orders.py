"""A gradient norm of another order than 2, or that is another number of the sum of squares than its root."""

from __future__ import annotations

import math
from collections.abc import Mapping

from moeverify.diagnose.families import name_family
from moeverify.results.facts import ClipFacts
from moeverify.results.formula_names import NormOrder
from moeverify.results.operation import NormOfOrder

_EXPERTS = "expert"


def find_order(
    norm: float | None, facts: ClipFacts, limit: float | None, *, noise: float
) -> NormOfOrder | None:
    """Return which number of all gradients a norm is that is the same on all ranks; None where none or several fit.

    `noise` is how far it may be off, relatively.
    """
    if norm is None or not math.isfinite(norm) or len(set(facts.norms)) > 1 or not facts.sizes:
        return None
    right = math.sqrt(sum(facts.squares.values()))
    found: list[NormOrder] = [
        order
        for order, value in _list_orders(facts, limit).items()
        if abs(norm - value) <= noise * value and abs(right - value) > noise * value
    ]
    return NormOfOrder(order=found[0]) if len(found) == 1 else None


def _list_orders(facts: ClipFacts, limit: float | None) -> Mapping[NormOrder, float]:
    squares, count = sum(facts.squares.values()), sum(size for _, _, size in facts.sizes.values())
    absolute = sum(each for each, _, _ in facts.sizes.values())
    experts = sum(each for name, (each, _, _) in facts.sizes.items() if name_family([name]) == _EXPERTS)
    orders: dict[NormOrder, float] = {
        "absolute": absolute,
        # Experts lie on another mesh than everything else, and each mesh has a norm.
        "absolute-apart": math.hypot(experts, absolute - experts),
        "largest": max(each for _, each, _ in facts.sizes.values()),
        "squares": squares,
        "mean-square": math.sqrt(squares / count),
        "mean-absolute": absolute / count,
        "root": squares**0.25,
    }
    if limit is not None:
        orders["clipped"] = limit
    return {order: value for order, value in orders.items() if value > 0.0}
