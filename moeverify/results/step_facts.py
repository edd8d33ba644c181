"""Facts about a recomputed optimizer step."""

from __future__ import annotations

import math
from typing import Literal

from moeverify.results.factor import Factor
from moeverify.results.record import Record

NEAR = 0.02
"""The relative difference below which factors are equal, if they are measured on rounded numbers."""


Option = Literal[
    "beta1", "1-beta1", "beta2", "1-beta2", "momentum", "1-momentum", "rate", "rate-of-options", "decay"
]
"""The components of a coefficient of an optimizer step: its options, and the learning rate of the step."""


class OptionPower(Record):
    """An option raised to a power, as a factor of a product."""

    option: Option
    power: float = 1.0


class OptionNumber(Record):
    """A coefficient that is the product `found` instead of `expected`; an empty product is 1.

    `steps` are the affected steps, if the coefficient is correct in other steps that could be tested.
    """

    found: tuple[OptionPower, ...]
    expected: tuple[OptionPower, ...]
    steps: tuple[int, ...] = ()


class TermFacts(Record):
    """A term of a recomputed value: its expected coefficient, and the one that explains the rank's value.

    `found` is None if no coefficients explain the value, or if the term is zero everywhere. `error` is the
    standard error of `found`. `number` is `found` as a product of options, if only one short product equals
    it.
    """

    name: str
    expected: float
    found: float | None = None
    error: float = 0.0
    number: OptionNumber | None = None

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
"""A change of the formula of the step. Changes with "other" or "bounded" have a fitted number."""

Changes = tuple[StepChange, ...]
"""All changes of a formula; the correct formula has none."""

RIGHT: Changes = ()

UNDECAYED: Changes = ("no-decay-in-gradient",)
AT_WEIGHT: Changes = ("decay-at-weight",)
"""Decay that is subtracted from the weight instead of being added to the gradient.

The gradient moments show `UNDECAYED`, and the update shows `AT_WEIGHT`.
"""

OTHER_STEP: Changes = ("corrected-for-other-step",)
"""A bias correction for some other step; a value that it fits may also fit a more specific formula."""

MOST_FORMS = 3
"""The maximum number of candidate formulas. If more formulas fit, too little is known to name any."""


class StepForm(Record):
    """A formula of the step, by its changes and its fitted number, if any."""

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
"""The meaning of a factor in terms of norms of a parameter."""


class DecayFacts(Record):
    """A moment that decays by `found` instead of `expected`, and takes 1 - `found` of the new value.

    `means` identifies `found`: 1 - `expected` (`complement`), `expected` rounded to a dtype, the
    optimizer's other beta, or unknown (empty).
    """

    expected: float
    found: float
    means: DecayMeaning = ""


class ShareFacts(Record):
    """A moment to which a step adds `found` times the sum of `terms`.

    `is_dampened` means that `found` is 1 - momentum. `is_corrected` means that the whole moment is
    multiplied by `found`, which is its bias correction or the inverse of it.
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
"""The shape of the learning rate decay, or the count of the layout that multiplies the rate."""


class ScheduleForm(Record):
    """A rule that gives the learning rates of all observed steps.

    The meaning of `number` depends on `way`:

    - `shifted`: the shift in steps, negative for earlier ones
    - `faster`, `slower`: the number of schedule steps per step, or of steps per schedule step
    - `length`: the length of the decay in steps
    - `geometric`, `floor`: the fraction of the rate that each step, or the end of the decay, keeps
    - `scaled`: the power of the count `name`, which multiplies the rate
    - `warmup`: the summand of (step + number) / over
    """

    way: ScheduleWay
    number: float = 0.0
    name: ScheduleName = ""
    over: int = 0


class RecomputedFacts(Record):
    """A result of the optimizer that does not follow from the inputs of this rank's optimizer.

    `terms` are the terms of the result. `clip` is the coefficient by which the gradient should have been
    clipped, if any. `others` are more tensors with the same error.

    `rate` is the optimizer's learning rate if it explains the result, `scheduled` the rate from the recipe,
    and `rate_step` the step that has `rate`, if any. `rates` are the optimizer's rates in all steps, and
    `schedule` the rules that give these rates, if known.

    `rounded_to` is a narrower dtype if every element equals the correct one rounded to it.
    `is_rounding_sure` is false if nothing has changed, because a missing step looks the same. `is_still`
    means that weights should change and do not.

    `decay` and `share` are the one number that explains a moment, if there is one. `variants` are the
    formulas that reproduce a smaller sample up to rounding. The correct formula is among them if the sample
    decides nothing. `means` is the meaning of the factor of the gradient or of the step in terms of norms,
    if known. `number` is the single factor of all wrong terms, or of the rate, in terms of the numbers of
    the run.
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
        """Return the most specific formulas that reproduce the step, or none if rounding hides which one."""
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
        """Return the changes of every formula that reproduces the result."""
        return tuple(form.changes for form in self.variants)

    @property
    def variant(self) -> Changes | None:
        """Return the changes of the formula, or None if none or several formulas reproduce the result."""
        return self.forms[0].changes if len(self.forms) == 1 else None

    @property
    def wrong_terms(self) -> tuple[TermFacts, ...]:
        """Return the terms with a wrong coefficient."""
        return tuple(term for term in self.terms if term.is_wrong)

    @property
    def is_told(self) -> bool:
        """Return whether anything is known about the error: coefficients of terms, or more."""
        known = self.is_still or self.is_rounding_sure or self.is_of_rate or self.forms or self.means
        return bool(known or self.decay or self.share) or any(term.found is not None for term in self.terms)

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
        known = self.is_still or self.is_rounding_sure or self.is_of_rate or self.forms or self.means
        if known or self.decay or self.share or self.number is not None:
            return False
        return any(self._is_unknown(term) for term in self.wrong_terms)

    def _is_unknown(self, term: TermFacts) -> bool:
        if term.factor is None or term.number is not None or term.power_of_two is not None:
            return False
        return abs(term.factor) >= NEAR and not self.lacks_clip(term)

    def lacks_clip(self, term: TermFacts) -> bool:
        """Return whether the term is the contribution of an unclipped gradient."""
        if self.clip is None or not self.clip < 1.0 or term.factor is None or "gradient" not in term.name:
            return False
        power = 2 if term.name.startswith("squared") else 1
        return abs(term.factor * self.clip**power - 1.0) < NEAR
