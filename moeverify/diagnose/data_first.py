"""What ranks read comes before everything that they computed of it: where it is wrong, it leads the report."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.checks.base import Role
from moeverify.checks.registry import CHECKS
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName, Kind
from moeverify.results.facts import CoverageFacts
from moeverify.results.finding import Finding
from moeverify.results.place import Place, Stage

# Of each token of the global batch: where the ranks together have not each of them once, some were not read.
_OF_TOKENS = (Kind.ROUTER_IDS, Kind.ROUTER_FLIPS, Kind.ROUTER_WEIGHTS, Kind.TOKEN_LOSS)

# Checks of their own that take the lengths of rows, or where these belong, from the case and not from what was read.
_BY_THE_CASE = frozenset(
    {CheckName.CROSS_ENTROPY, CheckName.OBJECTIVE, CheckName.ROUTER_GRADIENT, CheckName.COVERAGE}
)
ORIGINS = frozenset(check.name for check in CHECKS if check.role is Role.ORIGIN)


def put_data_first(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings with a wrong batch first; findings from its step on follow from it, without a cause."""
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
        return finding.kind in _OF_TOKENS  # it is of no step
    is_computed = finding.check not in ORIGINS or finding.check in _BY_THE_CASE
    return finding.step >= first.step and is_computed


def follow(finding: Finding, first: Finding) -> Finding:
    """Return a finding that follows another, without the place and the tests that it would have by itself."""
    cleared = {"follows": first.tensor, "place": None, "trials": (), "follow_up": None}
    return finding.model_copy(update=cleared)


def _follow_data(finding: Finding, first: Finding) -> Finding:
    """Return a finding without the cause that it would have if the data were right."""
    follower = follow(finding, first)
    if finding.check == CheckName.DATA:
        return follower
    unknown = {"explanation": None, "code": "", "rivals": (), "unexplained": ()}
    return follower.model_copy(update=unknown)


def _is_uncovered(finding: Finding) -> bool:
    """Return whether the ranks together have some tokens of the batch twice, or not at all."""
    facts = finding.facts
    is_part = isinstance(facts, CoverageFacts) and facts.num_elements is not None
    return finding.check == CheckName.COVERAGE and finding.kind in _OF_TOKENS and is_part


def _name_uncovered(finding: Finding) -> Finding:
    return finding.model_copy(update={"code": Cause.DATA.value, "place": Place(stage=Stage.DATA)})
