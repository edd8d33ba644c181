"""Helpers for findings of an optimizer step: the result that each is about, and copies with other facts."""

from __future__ import annotations

from moeverify.results.checks import Kind
from moeverify.results.finding import Finding


def name_result(kind: str, tensor: str) -> str:
    """Return the result of an optimizer: an update, or the name of a moment.

    `tensor` is `up.weight.exp_avg` for a moment.
    """
    return kind if kind == Kind.UPDATE else tensor.rpartition(".")[2]


def result_of(finding: Finding) -> str:
    """Return the optimizer result that a finding is about; see `name_result`."""
    return name_result(finding.kind, finding.tensor)
