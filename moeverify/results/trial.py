"""One test of a hypothesis on a wrong tensor, with its outcome: a line of `moeverify explain`."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from moeverify.results.observation import Observation
from moeverify.results.part import Contribution
from moeverify.results.record import Record


class Reason(StrEnum):
    """The reason why a hypothesis was not tested, or why its test fails."""

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
    """One test of a hypothesis about a wrong tensor, with its verdict.

    `hypothesis` is the name of a file in `moeverify.explain.fitting.hypotheses`. `about` is the tested variant if
    there are several, such as an axis. `contributions` are multiples of the parts of the golden; all ones
    is the golden itself. `residual` is the unexplained remainder: relative to the error for a fit,
    otherwise relative to the tensor. The verdict is `untried` if the test has no data, or if a simpler
    hypothesis explains the tensor; `reason` says which.

    `name`, `words` and `coefficients` (by part) are the same for readers; they are filled when JSON is
    written.
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
