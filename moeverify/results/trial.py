"""One test of a hypothesis on a wrong tensor, and what came of it: a line of `moeverify explain`."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from moeverify.results.observation import Observation
from moeverify.results.part import Contribution
from moeverify.results.record import Record


class Reason(StrEnum):
    """Why a hypothesis was not tested, or why a test says no."""

    SIMPLER_EXPLAINS = "simpler-explains"
    NO_SUCH_PARTS = "no-such-parts"
    TOO_FEW_NUMBERS = "too-few-numbers"
    EXPECTED_IS_ZERO = "expected-is-zero"
    EXPECTED_IS_CONSTANT = "expected-is-constant"
    NOT_COMPARABLE = "not-comparable"
    NO_EARLIER_VALUE = "no-earlier-value"
    EARLIER_IS_RIGHT = "earlier-is-right"
    OTHER_REGIONS = "other-regions"
    NOT_HELD = "not-held"
    REPLICAS_EQUAL = "replicas-equal"
    ZERO_IN_A_PART = "zero-in-a-part"
    NO_MULTIPLE = "no-multiple"
    UNEQUAL_MULTIPLES = "unequal-multiples"
    LOSSES_MATCH = "losses-match"
    MODULES_NOT_COMPARED = "modules-not-compared"


class Trial(Record):
    """One test of what could have made a tensor wrong, and what it said.

    `hypothesis` is the name of a file in `moeverify.diagnose.hypotheses`; `about` what of it was tried where there
    are several, such as an axis. `contributions` are those of the golden's parts: all ones is the golden.
    `residual` is what the hypothesis leaves, as a share of the error for a fit and of the tensor otherwise. A test
    that had nothing to look at, or that a simpler answer made needless, is `untried`, and `reason` says why.

    `name`, `words` and `coefficients` (by part) say the same for a reader; they are filled when JSON is written.
    """

    hypothesis: str = ""
    about: str = ""
    verdict: Literal["yes", "no", "untried"]
    reason: Reason | None = None
    contributions: tuple[Contribution, ...] = ()
    residual: float | None = None
    observations: tuple[Observation, ...] = ()
    name: str = ""
    words: str = ""
    coefficients: dict[str, float] = Field(default_factory=dict)
