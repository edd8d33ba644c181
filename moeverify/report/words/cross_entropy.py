"""Ways in which the cross entropy of each token is made otherwise, in words: `with a logarithm of base 2`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moeverify.report.words.factor import format_factor
from moeverify.results.change import Change

_LOSSES: Mapping[tuple[str, str], str] = {
    ("loss", "base-2"): "with a logarithm of base 2",
    ("loss", "base-10"): "with a logarithm of base 10",
    ("loss", "probability"): "with the probability of the label, without its logarithm",
    ("loss", "missing-probability"): "with 1 less the probability of the label",
    ("loss", "squared"): "with the square of each token's loss",
    ("loss", "exponential"): "with the exponential of each token's loss",
    ("loss", "focal"): "with a focal factor of (1 - probability) to the power of {number}",
    ("loss", "guarded"): "with {number} added to the probability before the logarithm",
    ("loss", "capped"): "with each token's loss cut off at {number}",
    ("loss", "plus"): "with {number} added to each token's loss",
    ("loss", "minus"): "with {number} subtracted from each token's loss",
    ("softmax-twice", "probabilities"): "with the softmax of the logits in the place of the logits",
    ("denominator", "without-label"): "with a denominator that leaves the label out",
    ("denominator", "largest"): "with the largest logit in place of the logarithm of the sum of exponentials",
    ("denominator", "less-largest"): "without adding the largest logit back after it was subtracted",
    (
        "denominator",
        "mean",
    ): "with the mean of the logits in place of the logarithm of the sum of exponentials",
    ("denominator", "over-positions"): "with a softmax over positions and not over the vocabulary",
    (
        "denominator",
        "own-part",
    ): "with a softmax over the label's own one of {number} parts of the vocabulary",
    ("denominator", "first-part"): "with a softmax over the first of {number} parts of the vocabulary",
    ("denominator", "sum-of-parts"): "with the logarithms of {number} parts of the vocabulary summed",
    ("denominator", "mean-of-parts"): "with the mean of the logarithms of {number} parts of the vocabulary",
    ("denominator", "all-twice"): "with {number} times the sum of exponentials",
    ("label", "of-position"): "with the label of the position {number} further in the place of each",
    ("label", "of-row"): "with the label of the row {number} further in the place of each",
    ("label", "class"): "with the class {number} further in the place of each label",
    ("smoothing", "all"): "with labels smoothed by {number}",
    ("smoothing", "all-subtracted"): "with labels smoothed by -{number}",
}
_ADDED: Mapping[str, str] = {
    "log-sum-squared": "the square of the logarithm of the softmax's denominator",
    "log-sum": "the logarithm of the softmax's denominator",
    "missing-probability": "1 less the label's probability",
    "squared-loss": "the square of the loss",
    "entropy": "the entropy of the softmax",
    "largest-logit": "the largest logit",
    "mean-logit": "the mean of the logits",
    "squared-logits": "the mean square of the logits",
    "label-logit": "the label's logit",
}
_FUNCTIONS: Mapping[str, str] = {
    "capped": "with its logits capped at {number} by a tanh",
    "clamped": "with its logits clamped to at most {number} in size",
    "clamped-above": "with its logits clamped to at most {number}",
    "times": "with its logits {number} times as large",
}
_EDGES: Mapping[str, str] = {
    "logits": "the logits",
    "denominator": "the softmax's denominator",
    "label": "the label's logit",
}
_TIMES: Mapping[str, str] = {
    "none": "without the gradient that comes through {what}",
    "twice": "with the gradient that comes through {what} twice",
    "opposite": "with the gradient that comes through {what} subtracted",
    "times": "with {number} times the gradient that comes through {what}",
}
_HOW: Mapping[str, str] = {
    "mean": "averaged over its width",
    "summed": "summed over its width",
    "centred": "less its mean over its width",
    "first-element": "that of its first element in the place of each",
    "next-element": "that of the next element in the place of each",
    "element-before": "that of the element before in the place of each",
    "reversed": "with its elements in reverse order",
    "positive": "where it is positive alone",
    "sign": "its signs alone",
    "of-unit-length": "divided by its length",
    "bfloat16": "rounded to bfloat16",
    "float16": "rounded to float16",
    "float32": "rounded to float32",
}


def describe_variant(changes: Sequence[Change]) -> str:
    """Return what a loss is, with its verb: `is the cross entropy with a logarithm of base 2`."""
    return f"is the cross entropy {', and '.join(map(_describe, changes))}"


def _describe(change: Change) -> str:
    number = "" if change.number is None else format_factor(change.number)
    if change.part == "logits-through":
        words = _FUNCTIONS[change.way]
    elif change.part == "added":
        words = f"with {{number}} times {_ADDED[change.name]} {change.way}"
    elif change.part == "gradient-of":
        words = _TIMES.get(change.way) or f"with the gradient that comes through {{what}} {_HOW[change.way]}"
    else:
        words = _LOSSES[change.part, change.way]
    return words.format(number=number, what=_EDGES.get(change.name, ""))
