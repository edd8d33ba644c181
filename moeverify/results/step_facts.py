"""Facts of an optimizer's step that was computed again."""

from __future__ import annotations

import math
from typing import Literal

from moeverify.results.factor import Factor
from moeverify.results.record import Record

NEAR = 0.02
"""Relative: factors that are measured in rounded numbers, and differ by less, are the same."""


Option = Literal[
    "beta1", "1-beta1", "beta2", "1-beta2", "momentum", "1-momentum", "rate", "rate-of-options", "decay"
]
"""What a coefficient of an optimizer's step is made of: its options, and the rate of the step."""


class OptionPower(Record):
    """An option to a power, as a part of a product."""

    option: Option
    power: float = 1.0


class OptionNumber(Record):
    """A coefficient that is a product of options in the place of another one; a product of nothing is 1.

    `steps` are those in which it is so, where it was right in others that could be seen.
    """

    found: tuple[OptionPower, ...]
    expected: tuple[OptionPower, ...]
    steps: tuple[int, ...] = ()


class TermFacts(Record):
    """A term of a value that was computed again: its coefficient, and the one that explains what the rank has.

    `found` is None where no coefficients explain it, or where the term is zero throughout; `error` is its standard
    error. `number` is what the coefficient is of the options, where only one short product of them equals it.
    """

    name: str
    expected: float
    found: float | None = None
    error: float = 0.0
    number: OptionNumber | None = None

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


StepChange = Literal[
    "epsilon-before-correction",
    "epsilon-in-root",
    "epsilon-squared-in-root",
    "epsilon-as-floor",
    "no-epsilon",
    "other-epsilon",
    "no-correction",
    "no-first-correction",
    "no-second-correction",
    "multiplied-by-corrections",
    "root-of-first-correction",
    "second-correction-without-root",
    "corrected-for-next-step",
    "corrected-for-step-before",
    "first-corrected-for-step-before",
    "second-corrected-for-step-before",
    "corrected-for-first-step",
    "first-corrected-for-first-step",
    "second-corrected-for-first-step",
    "corrected-for-other-step",
    "corrected-with-bfloat16-betas",
    "corrected-with-swapped-betas",
    "corrected-with-first-beta",
    "corrected-with-second-beta",
    "no-root",
    "fourth-root",
    "undivided",
    "sign-of-step",
    "bounded-step",
    "masked-by-gradient",
    "old-mean",
    "gradient-for-mean",
    "nesterov",
    "nesterov-corrected-ahead",
    "old-square",
    "squared-gradient-for-square",
    "largest-square",
    "no-decay",
    "decay-reversed",
    "decay-with-corrections",
    "decay-without-rate",
    "decay-by-squared-rate",
    "decay-after-step",
    "decay-of-step-alone",
    "decay-at-weight",
    "step-without-rate",
    "step-by-squared-rate",
    "decay-in-gradient",
    "decay-against-gradient",
    "no-decay-in-gradient",
    "constant-in-gradient",
    "constant-for-decay",
    "decay-times",
    "sign-of-gradient",
    "gradient-times-rate",
    "not-clipped",
    "clipped-by-value",
    "clipped-again",
    "not-squared",
    "root-of-gradient",
    "square-of-difference",
    "square-of-old-difference",
    "square-of-mean",
    "other-share",
    "other-beta",
    "other-kept",
    "undecayed",
    "largest",
    "epsilon-in-moment",
    "starts-at-weight",
    "starts-at-number",
    "starts-twice",
    "starts-dampened",
]
"""What of a formula of the step is made otherwise; "other" and "bounded" are solved for a number."""

Changes = tuple[StepChange, ...]
"""All of a formula that is made otherwise; of the right one nothing is."""

RIGHT: Changes = ()

UNDECAYED: Changes = ("no-decay-in-gradient",)
AT_WEIGHT: Changes = ("decay-at-weight",)
"""A decay that is taken from the weight in place of being added to its gradient, as each of both shows."""

OTHER_STEP: Changes = ("corrected-for-other-step",)
"""What fits some other step's corrections, and may fit a formula that is more particular as well."""

MOST_FORMS = 3
"""More formulas that all give what was made are no candidates, but say that little is known."""


class StepForm(Record):
    """A formula of the step by its changes, and the number that it was solved for, if it was for one."""

    changes: tuple[StepChange, ...] = ()
    number: float | None = None


DecayMeaning = Literal["", "complement", "bfloat16", "float16", "other-beta"]


FactorMeaning = Literal[
    "own-clip",
    "clip-of-shard",
    "clip-of-rank",
    "clip-of-kind",
    "clip-of-experts",
    "clipped-again",
    "unit-gradient",
    "trust-ratio",
    "unit-step",
    "unit-mean-square",
    "norm-of-weight",
    "mean-square-of-weight",
]
"""What a factor is of the norms of a parameter."""


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


ScheduleWay = Literal[
    "shifted",
    "faster",
    "slower",
    "shape",
    "length",
    "decay-from-start",
    "no-warmup",
    "warmup",
    "geometric",
    "floor",
    "scaled",
]

ScheduleCount = Literal["ranks", "data-parallel ranks", "micro-batches"]

ScheduleName = Literal[
    "",
    "constant",
    "linear",
    "cosine",
    "quarter-cosine",
    "quarter-sine",
    "whole-cosine",
    "root",
    "one-minus-root",
    "square",
    "one-minus-square",
    "inverse-root",
    "inverse",
    "ranks",
    "data-parallel ranks",
    "micro-batches",
]
"""The decay of the learning rate, or the count of the layout by which it is multiplied."""


class ScheduleForm(Record):
    """A rule that gives the rates of all steps that were seen.

    `number` is by how many steps it is shifted (before them where below 0), how many it takes in one or for one, the
    length of its decay, what a step or the end keeps, or the power of the count `name`. A warmup is
    (step + number) / over.
    """

    way: ScheduleWay
    number: float = 0.0
    name: ScheduleName = ""
    over: int = 0


class RecomputedFacts(Record):
    """A result of the optimizer that does not follow from what this rank's optimizer started from.

    `terms` make it up; `clip` is the coefficient by which the gradient should have been clipped, if any. `others`
    are more tensors of which the same is wrong. `rate` is the learning rate that the optimizer had, where that
    explains it, `scheduled` the one that the recipe gives, and `rate_step` the step whose it is, if any.
    `rounded_to` is a narrower dtype in which every element is what the right one is rounded to; that is not sure
    where nothing has changed, as where there was no step at all. `is_still` holds of weights that should move and
    do not. `decay` and `share` are the one number by which a moment is explained, if there is one. `variants` are
    the formulas of the step that give what a smaller sample has, up to rounding; the right one is among them where
    that tells nothing. `means` is what the factor of the gradient, or of the step, is of norms, where that is known.
    `number` is what the one factor of all wrong terms, or of the rate, is of the numbers of the run. `rates` are
    those that the optimizer had in all steps, `schedule` the rules by which these are made, if it is known.
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
    variants: tuple[StepForm, ...] = ()
    means: tuple[FactorMeaning, ...] = ()
    number: Factor | None = None
    rates: tuple[float, ...] = ()
    schedule: tuple[ScheduleForm, ...] = ()

    @property
    def forms(self) -> tuple[StepForm, ...]:
        """Return the most particular formulas by which the step was made; none where rounding hides which."""
        if (
            self.is_still
            or self.is_rounding_sure
            or self.is_of_rate
            or self.is_unclipped
            or RIGHT in self.tried
        ):
            return ()
        known = [form for form in self.variants if form.number is None] or list(self.variants)
        particular = tuple(form for form in known if form.changes != OTHER_STEP) or tuple(known)
        return particular if len(particular) <= MOST_FORMS else ()

    @property
    def tried(self) -> tuple[Changes, ...]:
        """Return the changes of all formulas that give what was made."""
        return tuple(form.changes for form in self.variants)

    @property
    def variant(self) -> Changes | None:
        """Return what of the formula is otherwise, None where nothing is known or several give the same."""
        return self.forms[0].changes if len(self.forms) == 1 else None

    @property
    def wrong_terms(self) -> tuple[TermFacts, ...]:
        """Return the terms that are there by another factor than they should be."""
        return tuple(term for term in self.terms if term.is_wrong)

    @property
    def is_told(self) -> bool:
        """Return whether anything is known of how the result was made: coefficients of its terms, or more."""
        known = self.is_still or self.is_rounding_sure or self.is_of_rate or self.forms or self.means
        return bool(known or self.decay or self.share) or any(term.found is not None for term in self.terms)

    @property
    def is_of_rate(self) -> bool:
        """Return whether all that is wrong is the learning rate, which each term of an update is multiplied by."""
        return self.rate is not None

    @property
    def is_unclipped(self) -> bool:
        """Return whether all that is wrong is that the gradient was not clipped."""
        wrong = self.wrong_terms
        return bool(wrong) and all(self.lacks_clip(term) for term in wrong)

    @property
    def is_estimate(self) -> bool:
        """Return whether all that is known are coefficients that are no number of the run, as far as it is seen."""
        known = self.is_still or self.is_rounding_sure or self.is_of_rate or self.forms or self.means
        if known or self.decay or self.share or self.number is not None:
            return False
        return any(self._is_unknown(term) for term in self.wrong_terms)

    def _is_unknown(self, term: TermFacts) -> bool:
        if term.factor is None or term.number is not None or term.power_of_two is not None:
            return False
        return abs(term.factor) >= NEAR and not self.lacks_clip(term)

    def lacks_clip(self, term: TermFacts) -> bool:
        """Return whether a term is that of a gradient which was not clipped."""
        if self.clip is None or not self.clip < 1.0 or term.factor is None or "gradient" not in term.name:
            return False
        power = 2 if term.name.startswith("squared") else 1
        return abs(term.factor * self.clip**power - 1.0) < NEAR
