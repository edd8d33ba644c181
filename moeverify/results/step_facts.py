"""Facts about a recomputed optimizer step."""

from __future__ import annotations

import math
from typing import Literal

from moeverify.results.record import Record

NEAR = 0.02
"""The relative difference below which factors are equal, if they are measured on rounded numbers."""


class TermFacts(Record):
    """A term of a recomputed value: its expected coefficient, and the one that explains the rank's value.

    `found` is None if no coefficients explain the value, or if the term is zero everywhere. `error` is the
    standard error of `found`.
    """

    name: str
    expected: float
    found: float | None = None
    error: float = 0.0

    @property
    def factor(self) -> float | None:
        """Return the multiple of the term, or None if it is unknown or the term should be absent."""
        return None if self.found is None or not self.expected else self.found / self.expected

    @property
    def power_of_two(self) -> int | None:
        """Return n if a gradient is multiplied by 2^n, as by a loss scale, with |n| of at least 4.

        A small coefficient is nonzero only if it is at least eight standard errors. In 16 bits, about one
        in fifty of all other numbers is as close to a power of two.
        """
        factor = self.factor
        if factor is None or factor <= 0.0 or "gradient" not in self.name or self.found is None:
            return None
        exponent = math.log2(factor) / (2 if self.name.startswith("squared") else 1)
        is_power = abs(exponent - round(exponent)) < NEAR / 2 and abs(round(exponent)) >= 4
        return round(exponent) if is_power and abs(self.found) >= 8.0 * self.error else None

    @property
    def is_wrong(self) -> bool:
        """Return whether the coefficient is known to be wrong."""
        if self.factor is None:
            return bool(self.found)  # present although it should be absent
        return abs(self.factor - 1.0) > NEAR


class RecomputedFacts(Record):
    """A result of the optimizer that does not follow from the inputs of this rank's optimizer.

    `terms` are the terms of the result. `clip` is the coefficient by which the gradient should have been
    clipped, if any.

    `rate` is the optimizer's learning rate if it explains the result, `scheduled` the rate from the recipe,
    and `rate_step` the step that has `rate`, if any.

    `rounded_to` is a narrower dtype if every element equals the correct one rounded to it.
    `is_rounding_sure` is false if nothing has changed, because a missing step looks the same. `is_still`
    means that weights should change and do not.
    """

    about: Literal["recomputed"] = "recomputed"
    terms: tuple[TermFacts, ...]
    clip: float | None = None
    rate: float | None = None
    scheduled: float = 0.0
    rate_step: int | None = None
    rounded_to: str = ""
    is_rounding_sure: bool = False
    is_still: bool = False

    @property
    def wrong_terms(self) -> tuple[TermFacts, ...]:
        """Return the terms with a wrong coefficient."""
        return tuple(term for term in self.terms if term.is_wrong)

    @property
    def is_of_rate(self) -> bool:
        """Return whether only the learning rate is wrong, which multiplies each term of an update."""
        return self.rate is not None

    @property
    def is_unclipped(self) -> bool:
        """Return whether the only error is a gradient that was not clipped."""
        wrong = self.wrong_terms
        return bool(wrong) and all(self.lacks_clip(term) for term in wrong)

    @property
    def is_estimate(self) -> bool:
        """Return whether only coefficients are known that match no number of the run."""
        if self.is_still or self.is_rounding_sure or self.is_of_rate:
            return False
        return any(self._is_unknown(term) for term in self.wrong_terms)

    def _is_unknown(self, term: TermFacts) -> bool:
        if term.factor is None or term.power_of_two is not None:
            return False
        return abs(term.factor) >= NEAR and not self.lacks_clip(term)

    def lacks_clip(self, term: TermFacts) -> bool:
        """Return whether the term is the contribution of an unclipped gradient."""
        if self.clip is None or not self.clip < 1.0 or term.factor is None or "gradient" not in term.name:
            return False
        power = 2 if term.name.startswith("squared") else 1
        return abs(term.factor * self.clip**power - 1.0) < NEAR
