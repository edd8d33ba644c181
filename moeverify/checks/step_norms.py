"""Explanation of a wrong factor by norms: a clip by a parameter's own norm, or a trust ratio.

A factor that differs between parameters explains nothing by itself. The norm of a whole parameter is
computed from the sums of squares of all ranks' rows, with each region counted once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from moeverify.checks.recomputed_step import Row
from moeverify.results.checks import Kind
from moeverify.results.step_facts import FactorMeaning, RecomputedFacts
from moeverify.train.clipping import GUARD

_NEAR = 1e-5
"""Relative difference up to which a factor matches a known value."""

_LEAST = 1e-3
"""Relative difference up to which the factors of two terms count as one."""


class StepNorms:
    """Sums of squares of one step, by parameter and by rank."""

    def __init__(self, rows: Sequence[tuple[int, Row]], limit: float | None) -> None:
        """Collect the rows of all ranks. `limit` is the limit of the clip."""
        self._limit = limit
        self._sizes: dict[str, dict[str, int]] = {}
        self._squares: dict[tuple[str, str], dict[str, float]] = {}
        self._of_rank: dict[int, float] = {}
        self._dims: dict[str, int] = {}
        for rank, row in rows:
            name = name_parameter(row)
            self._sizes.setdefault(name, {})[row.region] = row.num_elements
            self._dims[name] = len(row.index)
            for what, square in _list_squares(row):
                self._squares.setdefault((name, what), {})[row.region] = square
                if what == "gradient":
                    self._of_rank[rank] = self._of_rank.get(rank, 0.0) + square

    def name_factors(self, rank: int, row: Row, factor: float) -> set[FactorMeaning]:
        """Return the norm-based meanings of the factor of a row's gradient or step."""
        known = self._list_of_step(row) if row.key[1] == Kind.UPDATE else self._list_of_gradient(rank, row)
        return {name for name, value in known.items() if math.isclose(factor, value, rel_tol=_NEAR)}

    def _measure(self, name: str, what: str) -> float:
        return math.sqrt(sum(self._squares.get((name, what), {}).values()))

    def _measure_all(self, belongs: Callable[[str], bool]) -> float:
        """Return the norm of the gradients of all parameters for which `belongs` is true."""
        return math.hypot(*(self._measure(name, "gradient") for name in self._sizes if belongs(name)))

    def _is_matrix(self, name: str) -> bool:
        return self._dims[name] > 1

    def _list_of_gradient(self, rank: int, row: Row) -> Mapping[FactorMeaning, float]:
        """Return the candidate factors of a gradient that should have been clipped by the total norm."""
        if row.clip is None or self._limit is None or not row.clip > 0.0:
            return {}
        name, limit = name_parameter(row), self._limit
        own = self._measure(name, "gradient") / row.clip
        shard = math.sqrt(self._squares.get((name, "gradient"), {}).get(row.region, 0.0)) / row.clip
        of_rank = math.sqrt(self._of_rank.get(rank, 0.0)) / row.clip
        norms: Mapping[FactorMeaning, float] = {
            "own-clip": own,
            "clip-of-shard": shard,
            "clip-of-rank": of_rank,
            "clip-of-kind": self._measure_all(lambda each: self._is_matrix(each) == self._is_matrix(name))
            / row.clip,
            "clip-of-experts": self._measure_all(lambda each: _is_expert(each) == _is_expert(name))
            / row.clip,
        }
        found = {key: min(1.0, limit / (norm + GUARD)) / row.clip for key, norm in norms.items()}
        if own > 0.0:
            found["unit-gradient"] = 1.0 / (own * row.clip)
        return {**found, "clipped-again": row.clip}

    def _list_of_step(self, row: Row) -> Mapping[FactorMeaning, float]:
        """Return the candidate factors of a step, from the norms of its parameter."""
        name = name_parameter(row)
        weight, size = self._measure(name, "weight"), sum(self._sizes[name].values())
        steps: Mapping[str, float] = {
            "step": self._measure(name, "step"),
            "update": self._measure(name, "update"),
        }
        found: dict[FactorMeaning, float] = {}
        for norm in steps.values():
            if norm > 0.0 and weight > 0.0:
                found.setdefault("trust-ratio", weight / norm)
                found["unit-step"] = 1.0 / norm
                found["unit-mean-square"] = math.sqrt(size) / norm
        if weight > 0.0:
            found["norm-of-weight"], found["mean-square-of-weight"] = weight, weight / math.sqrt(size)
        return found


def name_factor(
    facts: RecomputedFacts, rows: Sequence[tuple[int, Row]], found: Sequence[float | None], norms: StepNorms
) -> RecomputedFacts:
    """Return the facts with the meanings that fit the factors `found` of all wrong rows of a tensor."""
    common: set[FactorMeaning] | None = None
    for (rank, row), factor in zip(rows, found, strict=True):
        if factor is None:
            return facts
        named = norms.name_factors(rank, row, factor)
        common = named if common is None else common & named
    return facts.model_copy(update={"means": tuple(sorted(common or ()))})


def find_one_factor(facts: RecomputedFacts) -> float | None:
    """Return the factor of the gradient or step, if nothing else is wrong; else None."""
    wrong = facts.wrong_terms
    named = [term for term in wrong if term.name in ("step", "gradient", "squared gradient")]
    if len(named) != 1 or named[0].factor is None or named[0].factor <= 0.0:
        return None
    factor = named[0].factor
    others = [term.factor for term in wrong if term is not named[0]]
    if any(other is None or not math.isclose(other, factor, rel_tol=_LEAST) for other in others):
        return None
    return math.sqrt(factor) if named[0].name.startswith("squared") else factor


def _is_expert(name: str) -> bool:
    return "experts" in name.split(".")


def name_parameter(row: Row) -> str:
    """Return the name of the parameter of a row."""
    return row.key[2] if row.key[1] == Kind.UPDATE else row.key[2].rpartition(".")[0]


def _list_squares(row: Row) -> Iterator[tuple[str, float]]:
    """Yield a row's sums of squares of gradient, weight, step, and update over the rate."""
    terms = dict(row.terms)
    for number, (name, _) in enumerate(row.terms):
        if name == "gradient" and row.key[1] == Kind.OPTIMIZER_STATE:
            yield "gradient", row.gram[number][number]
        elif name == "weight decay":
            yield "weight", row.gram[number][number]
        elif name == "step":
            yield "step", row.gram[number][number]
    rate = -terms.get("step", 0.0)
    if row.key[1] == Kind.UPDATE and rate:
        shares = [coefficient / rate for _, coefficient in row.terms]
        count = len(shares)
        pairs = [(i, j) for i in range(count) for j in range(count)]
        yield "update", sum(shares[i] * shares[j] * row.gram[i][j] for i, j in pairs)
