"""Facts of an optimizer's step that was computed again."""

from __future__ import annotations

import math
from typing import Literal

from moeverify.results.record import Record

NEAR = 0.02
"""Relative: factors that are measured in rounded numbers, and differ by less, are the same."""


class TermFacts(Record):
    """A term of a value that was computed again: its coefficient, and the one that explains what the rank has.

    `found` is None where no coefficients explain it, or where the term is zero throughout; `error` is its standard
    error.
    """

    name: str
    expected: float
    found: float | None = None
    error: float = 0.0

    @property
    def factor(self) -> float | None:
        """Return how many times the term is there; None where that is not known, or it should not be there."""
        return None if self.found is None or not self.expected else self.found / self.expected

    @property
    def power_of_two(self) -> int | None:
        """Return n where a gradient is there 2^n times, as with a scale of the loss: from 16 or 1/16 on.

        A coefficient is small and not zero where it is many standard errors. Of numbers that are no power of two one
        in fifty is as near to one, in 16 bits.
        """
        factor = self.factor
        if factor is None or factor <= 0.0 or "gradient" not in self.name or self.found is None:
            return None
        exponent = math.log2(factor) / (2 if self.name.startswith("squared") else 1)
        is_power = abs(exponent - round(exponent)) < NEAR / 2 and abs(round(exponent)) >= 4
        return round(exponent) if is_power and abs(self.found) >= 8.0 * self.error else None

    @property
    def is_wrong(self) -> bool:
        """Return whether the term is known to be there by another factor than it should be."""
        if self.factor is None:
            return bool(self.found)  # there, and it should not be
        return abs(self.factor - 1.0) > NEAR


RIGHT: Literal["right"] = "right"

StepVariant = Literal[
    "right",
    "epsilon-before-correction",
    "epsilon-in-root",
    "no-epsilon",
    "no-correction",
    "no-first-correction",
    "no-second-correction",
    "corrected-for-next-step",
    "corrected-for-step-before",
    "corrected-for-other-step",
    "multiplied-by-corrections",
    "corrected-with-bfloat16-betas",
    "corrected-with-swapped-betas",
    "decay-with-corrections",
    "decay-without-rate",
    "decay-after-step",
    "nesterov",
]

OTHER_STEP: Literal["corrected-for-other-step"] = "corrected-for-other-step"
"""What fits some other step's corrections, and may fit a formula that is more particular as well."""


DecayMeaning = Literal["", "complement", "bfloat16", "float16", "other-beta"]


class DecayFacts(Record):
    """A moment that decays by `found` in place of `expected`, and takes 1 - `found` of what the step adds.

    `means` is what `found` is: 1 - `expected`, `expected` rounded to a dtype, the optimizer's other beta, or nothing
    that is known.
    """

    expected: float
    found: float
    means: DecayMeaning = ""


class ShareFacts(Record):
    """A moment to which a step adds `found` times the sum of `terms`; `is_dampened` where that is 1 - momentum.

    `is_corrected` where all of the moment is there `found` times, and that is its bias correction or one over it.
    """

    found: float
    terms: tuple[str, ...]
    is_dampened: bool = False
    is_corrected: bool = False


class RecomputedFacts(Record):
    """A result of the optimizer that does not follow from what this rank's optimizer started from.

    `terms` make it up; `clip` is the coefficient by which the gradient should have been clipped, if any. `others`
    are more tensors of which the same is wrong. `rate` is the learning rate that the optimizer had, where that
    explains it, `scheduled` the one that the recipe gives, and `rate_step` the step whose it is, if any.
    `rounded_to` is a narrower dtype in which every element is what the right one is rounded to; that is not sure
    where nothing has changed, as where there was no step at all. `is_still` holds of weights that should move and
    do not. `decay` and `share` are the one number by which a moment is explained, if there is one. `variants` are
    the formulas of the step that give what a smaller sample has, up to rounding; the right one
    is among them where that tells nothing.
    """

    about: Literal["recomputed"] = "recomputed"
    terms: tuple[TermFacts, ...]
    clip: float | None = None
    others: tuple[str, ...] = ()
    rate: float | None = None
    scheduled: float = 0.0
    rate_step: int | None = None
    rounded_to: str = ""
    is_rounding_sure: bool = False
    is_still: bool = False
    decay: DecayFacts | None = None
    share: ShareFacts | None = None
    variants: tuple[StepVariant, ...] = ()

    @property
    def variant(self) -> StepVariant | None:
        """Return the one formula by which the step was made, None where there is none or rounding hides which."""
        is_other = self.is_still or self.is_rounding_sure or self.is_of_rate
        particular = tuple(name for name in self.variants if name != OTHER_STEP) or self.variants
        return particular[0] if len(particular) == 1 and particular[0] != RIGHT and not is_other else None

    @property
    def wrong_terms(self) -> tuple[TermFacts, ...]:
        """Return the terms that are there by another factor than they should be."""
        return tuple(term for term in self.terms if term.is_wrong)

    @property
    def is_of_rate(self) -> bool:
        """Return whether all that is wrong is the learning rate, which each term of an update is multiplied by."""
        return self.rate is not None

    @property
    def is_unclipped(self) -> bool:
        """Return whether all that is wrong is that the gradient was not clipped."""
        wrong = self.wrong_terms
        return bool(wrong) and all(self.lacks_clip(term) for term in wrong)

    def lacks_clip(self, term: TermFacts) -> bool:
        """Return whether a term is that of a gradient which was not clipped."""
        if self.clip is None or not self.clip < 1.0 or term.factor is None or "gradient" not in term.name:
            return False
        power = 2 if term.name.startswith("squared") else 1
        return abs(term.factor * self.clip**power - 1.0) < NEAR
