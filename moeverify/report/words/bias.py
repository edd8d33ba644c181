"""Sentences on the selection biases of routers."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.results.explanation import Explanation
from moeverify.results.operation import BiasRule, MovedOtherwise

_RULES: Mapping[BiasRule, str] = {
    "reversed": "in the wrong direction: up where an expert has more tokens than the mean",
    "frequency": "down for each expert that got a token, as where counts are compared with a share below 1",
    "median": "towards the median of the counts and not their mean",
    "unsigned": "by the difference of mean and count itself and not by its sign",
    "centred": "by its sign less the mean of all signs",
}


def describe_moved_otherwise(operation: MovedOtherwise, explanation: Explanation) -> str:
    """Return by which rule a selection bias moves."""
    count = len(explanation.subject.tensors)
    biases = "the selection bias moves" if count == 1 else f"{count} selection biases move"
    return f"{biases} {_RULES[operation.rule]}"
