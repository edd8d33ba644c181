"""Names of the optimizer results that findings are about."""

from __future__ import annotations

from moeverify.results.checks import Kind
from moeverify.results.finding import Finding


def name_result(kind: str, tensor: str) -> str:
    """Return the name of an optimizer's result: the update, or the name of a moment.

    For a moment, `tensor` is its full name, such as `up.weight.exp_avg`.
    """
    return kind if kind == Kind.UPDATE else tensor.rpartition(".")[2]


def result_of(finding: Finding) -> str:
    """Return the optimizer result that a finding is about; see `name_result`."""
    return name_result(finding.kind, finding.tensor)
