"""What findings of an optimizer's step have in common: which result each is about, and the same with other facts."""

from __future__ import annotations

from typing import Any

from moeverify.results.checks import Kind
from moeverify.results.finding import Finding
from moeverify.results.step_facts import RecomputedFacts, TermFacts


def name_result(kind: str, tensor: str) -> str:
    """Return what an optimizer has made: an update, or which moment. `tensor` is `up.weight.exp_avg` of a moment."""
    return kind if kind == Kind.UPDATE else tensor.rpartition(".")[2]


def result_of(finding: Finding) -> str:
    """Return which result of the optimizer a finding is about; see `name_result`."""
    return name_result(finding.kind, finding.tensor)


def with_facts(finding: Finding, **fields: Any) -> Finding:
    """Return a finding of a recomputed step with these fields of its facts."""
    assert isinstance(finding.facts, RecomputedFacts)
    return finding.model_copy(update={"facts": finding.facts.model_copy(update=fields)})


def forget_coefficients(facts: RecomputedFacts) -> tuple[TermFacts, ...]:
    """Return the terms of a result without what was measured of them."""
    return tuple(term.model_copy(update={"found": None, "error": 0.0}) for term in facts.terms)
