"""State that no rank has: if a layer or parameter is missing, every other finding follows."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.parallel.regions.observer import INITIAL
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName, Kind
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.facts import CoverageFacts
from moeverify.results.finding import Finding
from moeverify.results.operation import Zeroed
from moeverify.results.place import Place, Stage

_STATE = (Kind.INITIAL_WEIGHT, Kind.INITIAL_BUFFER)


def find_missing_state(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings of missing model state: one for all missing tensors, then those with missing parts.

    Only weights and buffers before the first step count: later tensors are missing because of these.
    """
    missing = [
        finding
        for finding in findings
        if finding.check == CheckName.COVERAGE and finding.step == INITIAL and finding.kind in _STATE
    ]
    whole = [finding for finding in missing if _is_whole(finding)]
    parts = [finding for finding in missing if not _is_whole(finding)]
    return ([_join(whole)] if whole else []) + parts


def _is_whole(finding: Finding) -> bool:
    return isinstance(finding.facts, CoverageFacts) and finding.facts.num_elements is None


def _join(findings: Sequence[Finding]) -> Finding:
    names = tuple(finding.tensor for finding in findings)
    subject = Subject(quantity=Quantity.INITIAL_VALUE, tensors=names)
    explanation = Explanation(cause=Cause.MISSING, subject=subject, operation=Zeroed(absent=True))
    return findings[0].model_copy(
        update={
            "explanation": explanation,
            "code": explanation.cause.value,
            "place": Place(stage=Stage.INITIALIZATION),
        }
    )
