"""Helpers for findings of an optimizer step: the result that each is about, and copies with other facts."""

from __future__ import annotations

from typing import Any

from moeverify.results.checks import Kind
from moeverify.results.finding import Finding
from moeverify.results.step_facts import RecomputedFacts, TermFacts


def name_result(kind: str, tensor: str) -> str:
    """Return the result of an optimizer: an update, or the name of a moment.

    `tensor` is `up.weight.exp_avg` for a moment.
    """
    return kind if kind == Kind.UPDATE else tensor.rpartition(".")[2]


def result_of(finding: Finding) -> str:
    """Return the optimizer result that a finding is about; see `name_result`."""
    return name_result(finding.kind, finding.tensor)


def with_facts(finding: Finding, **fields: Any) -> Finding:
    """Return a finding of a recomputed step with other values for these fields of its facts."""
    assert isinstance(finding.facts, RecomputedFacts)
    return finding.model_copy(update={"facts": finding.facts.model_copy(update=fields)})


def forget_coefficients(facts: RecomputedFacts) -> tuple[TermFacts, ...]:
    """Return the terms of a result without their measured values."""
    return tuple(term.model_copy(update={"found": None, "error": 0.0}) for term in facts.terms)
