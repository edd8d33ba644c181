"""Sentences on the selection biases of routers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moeverify.results.explanation import Explanation
from moeverify.results.formula_names import BiasWay
from moeverify.results.operation import MovedOtherwise

_WAYS: Mapping[BiasWay, str] = {
    "reversed": "in the wrong direction: up where an expert has more tokens than the mean",
    "frequency": "down for each expert that got a token, as where counts are compared with a share below 1",
    "median": "towards the median of the counts and not their mean",
    "unsigned": "by the difference of mean and count itself and not by its sign",
    "centred": "by its sign less the mean of all signs",
    "largest": "towards the largest of the counts and not their mean",
    "smallest": "towards the smallest of the counts and not their mean",
    "of-busy": "towards the mean of the counts that are not zero",
    "root": "by the root of the difference of mean and count and not by its sign",
    "overloaded": "down for experts with more tokens than the mean, and not up for the others",
    "underloaded": "up for experts with fewer tokens than the mean, and not down for the others",
    "up-at-mean": "up for experts with as many tokens as the mean",
    "down-at-mean": "down for experts with as many tokens as the mean",
    "other-rate": "by {:.5g} times its rate",
    "not-below-zero": "to no number below zero",
    "tanh": "by the hyperbolic tangent of the difference of mean and count and not by its sign",
    "sigmoid": "by the logistic function of the difference of mean and count and not by its sign",
    "arctan": "by the arc tangent of the difference of mean and count and not by its sign",
    "clipped": "by the difference of mean and count between -1 and 1 and not by its sign",
    "increasing": "by some increasing function of the difference of mean and count and not by its sign",
    "over-mean": "of that difference over the mean",
    "over-largest": "of that difference over the largest one",
    "over-total": "of that difference over all choices",
    "over-deviation": "of that difference over its deviation",
    "kept": "from a part of itself alone, as where it decays",
}


def describe_moved_otherwise(operation: MovedOtherwise, explanation: Explanation) -> str:
    """Return by which rule a selection bias moves."""
    count = len(explanation.subject.tensors)
    biases = "the selection bias moves" if count == 1 else f"{count} selection biases move"
    first, *rest = (_describe_rule(rule, operation.times) for rule in (operation.rule, *operation.rivals))
    said = f"either {first}, or {', or '.join(rest)}: the numbers are equal here" if rest else first
    return f"{biases} {said}"


def _describe_rule(rule: Sequence[BiasWay], times: float) -> str:
    return " and ".join(_WAYS[way].format(times) for way in rule)
