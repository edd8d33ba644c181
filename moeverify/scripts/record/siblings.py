"""Parameters of two ranks that are different parts of the model and begin with equal values. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping

from moeverify.results.finding import Finding, make_finding
from moeverify.results.script import CopyFacts, ScriptCheck

Parts = Mapping[str, tuple[tuple[int, ...], int]]
"""The plain parameters of a rank with random initial values: name -> (shape, hash of the values)."""


def find_siblings(one: Parts, two: Parts, *, is_apart: bool) -> dict[str, str]:
    """Return the parameters of `two` that equal another one of `one`, or nothing if fewer than half do.

    Candidates have the same shape, their names differ in numbers only, and each rank has one of them. With
    `is_apart`, the ranks have different parts under equal names. A few candidates may be equal in a right
    model, such as decay rates with a pattern.
    """
    by_kind: dict[object, list[str]] = {}
    for name, (shape, _) in one.items():
        by_kind.setdefault((_skeleton(name), shape), []).append(name)
    num_candidates, pairs = 0, dict[str, str]()
    for name, (shape, bits) in two.items():
        others = [
            other
            for other in by_kind.get((_skeleton(name), shape), ())
            if (is_apart if other == name else name not in one and other not in two)
        ]
        num_candidates += bool(others)
        equal = next((other for other in others if one[other][1] == bits), None)
        if equal is not None:
            pairs[name] = equal
    return pairs if 2 * len(pairs) >= num_candidates else {}


def repeats_siblings(parts: Parts) -> bool:
    """Return whether a rank has equal parameters itself, as in a model that copies one layer on purpose."""
    keys = [(_skeleton(name), shape, bits) for name, (shape, bits) in parts.items()]
    return len(set(keys)) < len(keys)


def make_copy_finding(step: int, ranks: tuple[int, ...], facts: CopyFacts) -> Finding:
    """Return the finding that ranks hold copies instead of different parts."""
    return make_finding(ScriptCheck.COPIES, facts.names[0], step, ranks, facts)


def _skeleton(name: str) -> str:
    return re.sub(r"\d+", "*", name)
