"""Errors of all compared tensors as fractions of their bounds, and the parts of these bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from moeverify.cases.schema import Recipe
from moeverify.results.bound import Bound, NearChoices
from moeverify.results.checks import Kind
from moeverify.results.error_map import ErrorMap
from moeverify.train.subjects import replays_routing
from moeverify.verification.checks.base import Check, CheckOutcome
from moeverify.verification.checks.bounds import Bounds
from moeverify.verification.compare.assembled import Assembled, Key
from moeverify.verification.golden.noise import FREE_KEY, HELD_KEY


def map_errors(
    outcomes: Sequence[tuple[Check[Any], CheckOutcome]], tensors: Mapping[Key, Assembled]
) -> tuple[ErrorMap, ...]:
    """Return an error map for each check that measures relative errors."""
    maps = (_map_outcome(outcome, tensors) for check, outcome in outcomes if check.kinds and outcome.limits)
    return tuple(maps)


def list_bounds(
    outcomes: Sequence[tuple[Check[Any], CheckOutcome]], tensors: Mapping[Key, Assembled], bounds: Bounds
) -> tuple[Bound, ...]:
    """Return the widest bound of each tensor of each check with its parts, unless it is exact.

    A check without parts derives its bounds from the ranks' own values.
    """
    widest: dict[tuple[str, str, str], Bound] = {}
    for _, outcome in outcomes:
        for key, limit in outcome.limits.items():
            if key in tensors and tensors[key].difference.sum_expected2 == 0.0:
                continue  # relative to all tensors of its kind
            parts = outcome.parts.get(key, {"recomputed": limit})
            name = (outcome.result.name, *key[1:])
            known = max(widest[name].parts.values()) if name in widest else 0.0
            if max(parts.values()) > known:
                widest[name] = Bound(
                    check=outcome.result.name,
                    tensor=key[2],
                    step=key[0],
                    error=outcome.errors.get(key),
                    parts={part: _shorten(value) for part, value in parts.items() if value},
                    factor=bounds.tolerance.factor,
                    **(bounds.list_sources(key) if "measured" in parts else {}),
                )
    return tuple(widest.values())


def count_choices(recipe: Recipe, noise: Mapping[str, float]) -> NearChoices | None:
    """Return the choices near a tie in the runs that measured the noise; None if none was near one."""
    if replays_routing(recipe):
        return NearChoices(is_replayed=True)
    held, free = (int(noise.get(key, 0.0)) for key in (HELD_KEY, FREE_KEY))
    return NearChoices(num_held=held, num_free=free) if held or free else None


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
    return _shorten(error / bound)


def _shorten(value: float) -> float:
    """Return three significant digits."""
    return float(f"{value:.3g}")
