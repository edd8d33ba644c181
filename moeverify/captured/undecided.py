"""What a comparison in 16 bits leaves open where nothing was measured: rounding may make it, and a small bug too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from moeverify.captured.limits import UNDECIDED
from moeverify.results.checks import CheckName
from moeverify.results.finding import CheckResult, Finding, Inconclusive

# A gradient's error is that of the norm of all of them too. What it does to moments and to an adaptive optimizer's
# updates is its root at most, as in the bounds.
_LIMITS: Mapping[str, float] = {
    CheckName.GRADIENT: UNDECIDED,
    CheckName.GRADIENT_NORM: UNDECIDED,
    CheckName.UPDATE: math.sqrt(UNDECIDED),
    CheckName.OPTIMIZER_STATE: math.sqrt(UNDECIDED),
}


def are_undecided(findings: Sequence[Finding]) -> bool:
    """Return whether all that differs is gradients by so little, without a cause, and what follows from them."""
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
    """Return the result of a check whose findings are undecided: no mismatch, and nothing verified of these."""
    own = tuple(
        Inconclusive(tensor=finding.tensor, step=finding.step, limit=_LIMITS[finding.check])
        for finding in findings
        if finding.check == result.name
    )
    changes = {"verdict": "pass", "inconclusive": len(own), "inconclusive_tensors": own}
    return result.model_copy(update=changes) if own else result
