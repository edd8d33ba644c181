"""Errors of all compared tensors as fractions of their bounds, and the parts of these bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from moeverify.results.bound import Bound
from moeverify.results.checks import Kind
from moeverify.results.error_map import ErrorMap
from moeverify.verification.checks.base import Check, CheckOutcome
from moeverify.verification.compare.assembled import Assembled, Key


def map_errors(
    outcomes: Sequence[tuple[Check[Any], CheckOutcome]], tensors: Mapping[Key, Assembled]
) -> tuple[ErrorMap, ...]:
    """Return an error map for each check that measures relative errors."""
    maps = (_map_outcome(outcome, tensors) for check, outcome in outcomes if check.kinds and outcome.limits)
    return tuple(maps)


def list_bounds(
    outcomes: Sequence[tuple[Check[Any], CheckOutcome]], tensors: Mapping[Key, Assembled], factor: float
) -> tuple[Bound, ...]:
    """Return the widest bound of each tensor with its parts, for tensors whose bound is not the floor."""
    widest: dict[tuple[str, str], Bound] = {}
    for _, outcome in outcomes:
        for key, parts in outcome.parts.items():
            name = (outcome.result.name, key[2])
            kept = widest.get(name)
            if kept is None or max(parts.values()) > max(kept.parts.values(), default=0.0):
                error = tensors[key].difference.relative_error
                rounded = {part: float(f"{value:.3g}") for part, value in parts.items() if value}
                widest[name] = Bound(
                    check=name[0], tensor=key[2], step=key[0], error=error, parts=rounded, factor=factor
                )
    return tuple(each for each in widest.values() if _is_measured(each))


def _is_measured(bound: Bound) -> bool:
    """Return whether another part than the floor decides a bound that is not exact."""
    return max(bound.parts.values(), default=0.0) > bound.parts.get("floor", 0.0)


def _map_outcome(outcome: CheckOutcome, tensors: Mapping[Key, Assembled]) -> ErrorMap:
    found = {(each.step, each.kind, each.tensor): each for each in outcome.findings}
    shares: dict[str, dict[int, float]] = {}
    for key, limit in outcome.limits.items():
        step, kind, name = key
        if key in found:
            share = _divide(found[key].error, found[key].bound)
        elif key in tensors:
            # An all-zero golden has no relative error. Without a finding, the tensor is within its bound.
            share = min(_divide(tensors[key].difference.relative_error, limit), 1.0)
        else:
            continue
        row = shares.setdefault(name.rpartition(".")[0] if kind == Kind.OPTIMIZER_STATE else name, {})
        row[step] = max(share, row.get(step, 0.0))
    steps = tuple(sorted({step for row in shares.values() for step in row}))
    return ErrorMap(
        check=outcome.result.name,
        tensors=tuple(shares),
        steps=steps,
        shares=tuple(tuple(row.get(step) for step in steps) for row in shares.values()),
    )


def _divide(error: float, bound: float) -> float:
    """Return error / bound to three significant digits; infinity for NaN or a bound of 0."""
    if error == 0.0:
        return 0.0
    if bound <= 0.0 or not math.isfinite(error):
        return math.inf
    return float(f"{error / bound:.3g}")
