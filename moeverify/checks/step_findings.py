"""What findings of an optimizer's step have in common: which result each is about, and the same with other facts."""

from __future__ import annotations

from moeverify.results.checks import Kind
from moeverify.results.finding import Finding


def name_result(kind: str, tensor: str) -> str:
    """Return what an optimizer has made: an update, or which moment. `tensor` is `up.weight.exp_avg` of a moment."""
    return kind if kind == Kind.UPDATE else tensor.rpartition(".")[2]


def result_of(finding: Finding) -> str:
    """Return which result of the optimizer a finding is about; see `name_result`."""
    return name_result(finding.kind, finding.tensor)
