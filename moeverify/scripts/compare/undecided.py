"""Undecided differences in 16 bits without measured noise: rounding or a small error may cause them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from moeverify.results.checks import CheckName
from moeverify.results.finding import CheckResult, Finding, Inconclusive
from moeverify.scripts.compare.limits import UNDECIDED

# The error of a gradient bounds that of the total norm. Its effect on moments and on adaptive updates is at
# most its square root, as in the bounds.
_LIMITS: Mapping[str, float] = {
    CheckName.GRADIENT: UNDECIDED,
    CheckName.GRADIENT_NORM: UNDECIDED,
    CheckName.UPDATE: math.sqrt(UNDECIDED),
    CheckName.OPTIMIZER_STATE: math.sqrt(UNDECIDED),
}


def are_undecided(findings: Sequence[Finding]) -> bool:
    """Return whether all findings are small, unexplained differences of gradients and their consequences."""
    origins = [finding for finding in findings if not finding.follows]
    return (
        bool(findings)
        and all(finding.check in _LIMITS and finding.error <= _LIMITS[finding.check] for finding in findings)
        and all(
            finding.check == CheckName.GRADIENT and finding.explanation is None and not finding.observations
            for finding in origins
        )
    )


def set_aside(result: CheckResult, findings: Sequence[Finding]) -> CheckResult:
    """Return the result of a check with undecided findings: a pass with inconclusive tensors."""
    own = tuple(
        Inconclusive(tensor=finding.tensor, step=finding.step, limit=_LIMITS[finding.check])
        for finding in findings
        if finding.check == result.name
    )
    changes = {"verdict": "pass", "inconclusive": len(own), "inconclusive_tensors": own}
    return result.model_copy(update=changes) if own else result
