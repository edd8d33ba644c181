"""Takes back causes that say of gradients that they match, where these may be as wrong without being seen.

In 16 bits a gradient may be off by a quarter of itself within its bound, a norm by a hundredth. A norm that is off
by less than gradients may be says nothing of how it was made; and where it is the norm of the ranks' own gradients,
these are wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName
from moeverify.results.explanation import Explanation, Quantity
from moeverify.results.factor import Factor
from moeverify.results.finding import Finding
from moeverify.results.operation import Scaled
from moeverify.results.part import WHOLE
from moeverify.results.upstream import OffUpstream

_OTHERWISE: Mapping[Cause, Cause] = {Cause.NORM: Cause.BACKWARD, Cause.METRIC: Cause.SCALE}
"""What may be said in place of a cause that says that gradients match."""


def doubt_causes(findings: Sequence[Finding], inputs: DiagnosisInputs) -> list[Finding]:
    """Return the findings, those of what gradients make as an open question where gradients may be as wrong."""
    unlike = {each.step for each in findings if each.check == CheckName.CLIP}
    return [_doubt(finding, inputs, is_of_own=finding.step not in unlike) for finding in findings]


def _doubt(finding: Finding, inputs: DiagnosisInputs, *, is_of_own: bool) -> Finding:
    """Return a finding; `is_of_own` says that no norm of its step is seen to be another than its gradients have."""
    explanation = finding.explanation
    if explanation is None or finding.follows or finding.check == CheckName.CLIP:
        return finding  # the clip is compared with what the ranks' own gradients give
    factor = _find_factor(finding, explanation)
    if factor is None:
        return finding
    error, limit = abs(factor.value - 1.0), inputs.limits.get(CheckName.GRADIENT, 0.0)
    is_norm = explanation.subject.quantity is Quantity.GRADIENT_NORM
    is_sure = is_norm and is_of_own and inputs.limits.get(CheckName.CLIP, math.inf) < error
    # A norm that is seen to be another than the ranks' own gradients have is wrong by itself.
    is_open = error <= limit and (is_of_own or not is_norm)
    if not is_sure and not is_open:
        return finding
    cause = _OTHERWISE.get(explanation.cause, explanation.cause)
    operation = OffUpstream(factor=factor, limit=limit, is_sure=is_sure)
    doubted = explanation.model_copy(update={"operation": operation, "cause": cause})
    return finding.model_copy(update={"explanation": doubted, "code": cause})


def _find_factor(finding: Finding, explanation: Explanation) -> Factor | None:
    """Return how often something is there of which a cause says that its gradients match; None where none does."""
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
