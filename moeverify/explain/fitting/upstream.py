"""Withdrawal of causes that require matching gradients, if gradients may be equally wrong without detection.

In 16 bits, a gradient may be off by a quarter within its tolerance, a norm by a hundredth. If a norm is off
by less than gradients may be, its computation may still be right. If it is the norm of the ranks' own
gradients, these gradients are wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName
from moeverify.results.explanation import Explanation, Quantity
from moeverify.results.factor import Factor
from moeverify.results.finding import Finding
from moeverify.results.operation import Scaled
from moeverify.results.part import WHOLE
from moeverify.results.upstream import OffUpstream

_OTHERWISE: Mapping[Cause, Cause] = {Cause.NORM: Cause.BACKWARD, Cause.METRIC: Cause.SCALE}
"""Replacements of causes that require matching gradients."""


def doubt_causes(findings: Sequence[Finding], inputs: DiagnosisInputs) -> list[Finding]:
    """Leave the cause of a finding open if gradients may be as wrong as the result computed from them."""
    unlike = {each.step for each in findings if each.check == CheckName.CLIP}
    return [_doubt(finding, inputs, is_of_own=finding.step not in unlike) for finding in findings]


def _doubt(finding: Finding, inputs: DiagnosisInputs, *, is_of_own: bool) -> Finding:
    """Return a finding, with an open cause if gradients may be as wrong.

    `is_of_own` is true if no norm of its step differs from the norm of the ranks' own gradients.
    """
    explanation = finding.explanation
    if explanation is None or finding.follows or finding.check == CheckName.CLIP:
        return finding  # the clip check compares with the ranks' own gradients
    factor = _find_factor(finding, explanation)
    if factor is None:
        return finding
    error, limit = abs(factor.value - 1.0), inputs.limits.get(CheckName.GRADIENT, 0.0)
    is_norm = explanation.subject.quantity is Quantity.GRADIENT_NORM
    is_sure = is_norm and is_of_own and inputs.limits.get(CheckName.CLIP, math.inf) < error
    # A norm that differs from the norm of the ranks' own gradients is wrong by itself.
    is_open = error <= limit and (is_of_own or not is_norm)
    if not is_sure and not is_open:
        return finding
    cause = _OTHERWISE.get(explanation.cause, explanation.cause)
    operation = OffUpstream(factor=factor, limit=limit, is_sure=is_sure)
    doubted = explanation.model_copy(update={"operation": operation, "cause": cause})
    return finding.model_copy(update={"explanation": doubted, "code": cause})


def _find_factor(finding: Finding, explanation: Explanation) -> Factor | None:
    """Return the factor of a result whose cause requires matching gradients; None for other causes."""
    quantity, operation = explanation.subject.quantity, explanation.operation
    if quantity is Quantity.GRADIENT_NORM and explanation.cause is Cause.NORM:
        if finding.expected and finding.actual is not None and math.isfinite(finding.actual):
            return Factor(value=finding.actual / finding.expected)
        return None
    says_so = quantity is Quantity.UPDATE or (quantity is Quantity.LOSS and explanation.cause is Cause.METRIC)
    if not says_so or not isinstance(operation, Scaled) or operation.ranks:
        return None
    parts = [each.part for each in operation.contributions]
    return operation.contributions[0].factor if parts == [WHOLE] else None
