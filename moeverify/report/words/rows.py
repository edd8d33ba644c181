"""Words for what a module makes of the rows that one inside of it returns."""

from __future__ import annotations

from moeverify.results.explanation import Explanation
from moeverify.results.operation import Reweighted


def describe_reweighted(operation: Reweighted, explanation: Explanation) -> str:
    """Return by which weights a module sums the rows that one inside of it returns."""
    module, rows = explanation.subject.module, f"rows that {operation.rows} returns"
    if operation.way == "left-out":
        return f"{module} leaves out {operation.num_wrong} of the {operation.num_rows} {rows} (inputs match)"
    total = f"weights that sum to {operation.total or 0.0:.6g} at each token"
    ways = {
        "normalized": f"{total}, which those of one device do not",
        "exchanged": "the weights of other copies of the same tokens",
        "other": "other weights than one device",
    }
    return f"{module} sums the {rows} by {ways[operation.way]} (inputs match)"
