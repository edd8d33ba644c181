"""Rating of findings by how much they tell about their cause, so that a wider run may lead. Does not import torch."""

from __future__ import annotations

from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.finding import Finding
from moeverify.results.step_facts import RecomputedFacts
from moeverify.results.upstream import OffUpstream

SURE, UPSTREAM = 5, -1
"""The highest and the lowest rating; see `rate_cause`."""

_ESTIMATE, _TRACED, _UNTRACED = 4, 3, 2

# Causes that name a kind of operation, where others only name a place.
_NAMING_CODES = (Cause.OPTIMIZER, Cause.ROUNDING)


def rate_cause(finding: Finding | None) -> int:
    """Rate how much a finding tells about its cause.

    -1: the cause is upstream of the finding, and a wider run may show it. 0: nothing. 1: a location or a
    size. 2: a part of a sum in the gradient of a module. 3: the first wrong operation among the recorded
    ones, so that the sum is refuted. 4: an estimated operation, or its kind. 5: a certain operation.
    """
    if finding is None:
        return 0
    if _is_upstream(finding):
        return UPSTREAM
    if not finding.names_operation:
        return _rate_place(finding)
    if _is_untraced(finding):
        return _UNTRACED
    return _ESTIMATE if finding.is_estimate else SURE


def _rate_place(finding: Finding) -> int:
    """Rate a finding that names no operation."""
    if finding.culprit is not None and finding.culprit.leads:
        return _TRACED
    if finding.code in _NAMING_CODES and not _is_unfitted(finding):
        return _ESTIMATE
    return int(finding.is_explained)


def _is_untraced(finding: Finding) -> bool:
    """Return whether a cause was fitted to the gradient of a module, with no operations recorded after it.

    A part of a sum is right there if a later operation reduces it.
    """
    explanation = finding.explanation
    is_of_module = explanation is not None and explanation.subject.quantity is Quantity.MODULE_GRADIENT
    return is_of_module and finding.culprit is None


def _is_unfitted(finding: Finding) -> bool:
    """Return whether no term of the optimizer's step explains a wrong update or moment."""
    facts = finding.facts
    return isinstance(facts, RecomputedFacts) and not facts.wrong_terms and not facts.is_rounding_sure


def _is_upstream(finding: Finding) -> bool:
    return finding.explanation is not None and isinstance(finding.explanation.operation, OffUpstream)
