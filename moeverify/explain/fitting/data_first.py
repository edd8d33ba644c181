"""Order of findings about input data: wrong data leads the report, and all results follow."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName, Kind
from moeverify.results.facts import CoverageFacts
from moeverify.results.finding import Finding
from moeverify.results.place import Place, Stage
from moeverify.verification.checks.base import Role
from moeverify.verification.checks.registry import CHECKS

# Kinds with one value for each token of the global batch. If ranks together do not have each token exactly
# once, some tokens were not read.
_OF_TOKENS = (Kind.ROUTER_IDS, Kind.ROUTER_FLIPS, Kind.ROUTER_WEIGHTS, Kind.TOKEN_LOSS)

# Checks that take the lengths or positions of rows from the case, not from the batch that was read.
_BY_THE_CASE = frozenset(
    {CheckName.CROSS_ENTROPY, CheckName.OBJECTIVE, CheckName.ROUTER_GRADIENT, CheckName.COVERAGE}
)
ORIGINS = frozenset(check.name for check in CHECKS if check.role is Role.ORIGIN)


def put_data_first(findings: Sequence[Finding]) -> list[Finding]:
    """Put a wrong batch first. Findings from its step on follow it and lose their causes."""
    data = sorted((each for each in findings if each.check == CheckName.DATA), key=lambda each: each.step)
    heads = data or [_name_uncovered(each) for each in findings if _is_uncovered(each)]
    if not heads:
        return list(findings)
    first, *later = heads
    others = [each for each in findings if each.check != CheckName.DATA and (data or not _is_uncovered(each))]
    made = [each for each in others if _is_made_of_data(each, first)]
    kept = [each for each in others if not _is_made_of_data(each, first)]
    return [first, *kept, *(_follow_data(each, first) for each in (*later, *made))]


def _is_made_of_data(finding: Finding, first: Finding) -> bool:
    if finding.check == CheckName.SHARDING:
        return finding.kind in _OF_TOKENS  # it belongs to no step
    is_computed = finding.check not in ORIGINS or finding.check in _BY_THE_CASE
    return finding.step >= first.step and is_computed


def follow(finding: Finding, first: Finding) -> Finding:
    """Return a finding that follows another, without a place and follow-up of its own."""
    cleared = {"follows": first.tensor, "place": None, "follow_up": None}
    return finding.model_copy(update=cleared)


def _follow_data(finding: Finding, first: Finding) -> Finding:
    """Return a follower without the cause that would apply to right data."""
    follower = follow(finding, first)
    if finding.check == CheckName.DATA:
        return follower
    unknown = {"explanation": None, "code": "", "rivals": (), "unexplained": ()}
    return follower.model_copy(update=unknown)


def _is_uncovered(finding: Finding) -> bool:
    """Return whether the ranks together have some tokens of the batch twice or not at all."""
    facts = finding.facts
    is_part = isinstance(facts, CoverageFacts) and facts.num_elements is not None
    return finding.check == CheckName.COVERAGE and finding.kind in _OF_TOKENS and is_part


def _name_uncovered(finding: Finding) -> Finding:
    return finding.model_copy(update={"code": Cause.DATA.value, "place": Place(stage=Stage.DATA)})
