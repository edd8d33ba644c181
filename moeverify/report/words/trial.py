"""Hypothesis tests in words: the tested hypothesis and its result."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.report.words.observation import describe_observations, describe_residual
from moeverify.results.trial import Reason, Trial

_REASONS: Mapping[Reason, str] = {
    Reason.SIMPLER_EXPLAINS: "fewer coefficients explain it already",
    Reason.NO_SUCH_PARTS: "the golden has no such parts here",
    Reason.TOO_FEW_NUMBERS: "too few numbers for so many coefficients, or every part is zero",
    Reason.EXPECTED_IS_ZERO: "the expected value is zero itself",
    Reason.EXPECTED_IS_CONSTANT: "the expected value is constant, and every constant is a multiple of it",
    Reason.NOT_COMPARABLE: "too small, too large or not finite",
    Reason.NO_EARLIER_VALUE: "there is none",
    Reason.EARLIER_IS_RIGHT: "it equals the expected value",
    Reason.OTHER_REGIONS: "the ranks of one group hold different parts",
    Reason.NOT_HELD: "no rank holds any of it",
    Reason.REPLICAS_EQUAL: "the replicas are equal, so they are no partial sums",
    Reason.ZERO_IN_A_PART: "the expected value is zero in a part",
    Reason.NO_MULTIPLE: "the sum is no multiple of the expected value",
    Reason.UNEQUAL_MULTIPLES: "the sums of the parts are different multiples of the expected value",
    Reason.LOSSES_MATCH: "the loss terms match",
    Reason.MODULES_NOT_COMPARED: (
        "modules are not compared: rounding of bfloat16 hides where it began, and there is no step -1"
    ),
}
_VERDICTS = {"yes": "explains it", "no": "does not explain it", "untried": "not tested"}


def name_trial(trial: Trial) -> str:
    """Return the name of a test: the hypothesis, and the quantity it was applied to."""
    if not trial.hypothesis:  # from a file of an older version
        return trial.name
    words = " ".join(trial.hypothesis.split("_"))
    return f"{words}, {trial.about}" if trial.about else words


def describe_trial(trial: Trial) -> str:
    """Return the result of a test."""
    if not trial.hypothesis:
        return trial.words
    if trial.reason is not None:
        return _REASONS[trial.reason]
    if trial.observations:
        return describe_observations(trial.observations)
    return describe_residual(trial.residual) if trial.residual is not None else _VERDICTS[trial.verdict]
