"""Sentences about wrong reductions, counts and loss terms."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from moeverify.report.numbers import format_ranks
from moeverify.report.words.factor import describe_factor, describe_sources, name_products
from moeverify.report.words.subject import name_subject
from moeverify.results.cause import Cause
from moeverify.results.change import Change
from moeverify.results.explanation import Explanation
from moeverify.results.operation import (
    Miscounted,
    Misplaced,
    Misreduced,
    Redefined,
    Unreduced,
    Unwritten,
)

# Keys are (part, way) of a loss term: the quantity used instead of the probabilities, counts or sizes.
_REDEFINED: Mapping[tuple[str, str], str] = {
    ("probabilities", "softmax"): "the softmax of the logits in place of the divided sigmoids",
    ("probabilities", "sigmoid"): "sigmoids of the logits, divided by their sum, in place of the softmax",
    ("probabilities", "undivided"): "sigmoids of the logits that are not divided by their sum",
    ("probabilities", "softmax-again"): "a softmax of the probabilities in place of these",
    ("probabilities", "softmax-of-scores"): "a softmax of the scores in place of the divided scores",
    ("probabilities", "logits"): "the logits in place of the probabilities",
    ("probabilities", "chosen"): "the probabilities of the chosen experts alone",
    ("probabilities", "chosen-softmax"): "a softmax of the chosen experts' logits alone",
    (
        "probabilities",
        "chosen-sigmoid",
    ): "the sigmoid of the chosen experts' logits alone, divided by its sum",
    (
        "probabilities",
        "chosen-normalized",
    ): "the probabilities of the chosen experts alone, divided by their sum",
    ("probabilities", "chosen-mean"): "the mean probability of the chosen experts for every expert alike",
    ("probabilities", "chosen-sum"): "the sum of the chosen experts' probabilities for every expert alike",
    ("probabilities", "best"): "the largest probability of each token for every expert alike",
    ("counts", "without-groups"): "the counts of a choice without groups",
    ("counts", "without-bias"): "the counts of a choice without the selection bias",
    ("counts", "plain"): "the counts of a choice without groups and without the selection bias",
    ("counts", "first"): "the counts of each token's first choice alone",
    ("counts", "padded"): "counts in which tokens of padding take part",
    ("counts", "probabilities"): "the summed probabilities in place of the counts, with their gradient",
    (
        "counts",
        "detached-probabilities",
    ): "the summed probabilities in place of the counts, without their gradient",
    ("counts", "uniform"): "the same count for every expert",
    ("probabilities", "squared"): "the squares of the probabilities",
    ("probabilities", "logarithm"): "the logarithms of the probabilities",
    ("sizes", "unsquared"): "the logsumexp of each token's logits, without its square",
    ("sizes", "mean-square"): "the mean square of each token's logits, not of the square of their logsumexp",
    ("sizes", "sum-of-squares"): "the sum of the squares of each token's logits",
    ("sizes", "largest"): "the square of each token's largest logit",
    ("sizes", "log-mean-exp"): "the squared logarithm of the mean of exponentials, not of their sum",
    ("sizes", "log-of-sum"): "the squared logsumexp of the scores, not of the logits",
    ("sizes", "of-chosen"): "the squared logsumexp of the chosen experts' logits alone",
    ("sizes", "mean-of-logits"): "the square of the mean of each token's logits",
}
_COMBINED = {"max": "largest", "min": "smallest", "product": "product"}


def describe_misreduced(operation: Misreduced, explanation: Explanation) -> str:
    """Return which sum was computed differently, over which ranks, and where."""
    subject = name_subject(explanation.subject)
    where = f"the {operation.op}{name_site(operation.site)}"
    met = f"over {name_products(operation.met) or format_ranks(operation.ranks)}"
    if not operation.axes:
        again = "adds up what is right on each rank already"
        return f"{subject} {subject.be} reduced once more {met}: {where} {again}"
    right = f"what ranks bring to {where} sums to the expected value over {name_products(operation.axes)}"
    if operation.combination == "sum":
        return f"{subject} {subject.be} summed {met} in the place of {name_products(operation.axes)}: {right}"
    if operation.combination == "copy":
        copied = f"{subject.pick('a copy', 'copies')} of what one rank has"
        return f"{subject} {subject.be} {copied} {met} and not the sum: {right}"
    return f"{subject} {subject.be} the {_COMBINED[operation.combination]} {met} and not the sum: {right}"


def describe_unheld(operation: Unreduced, total: str) -> str:
    """Return that slices are not summed over the ranks that hold them; the partial sums give `total`."""
    sums = f"what the ranks have of each, up to {operation.num_replicas} of them, sums to {total}"
    sources = describe_sources(operation.factor)
    return f"not reduced over the ranks that hold the same slice: {sums}" + (
        f"; {sources}" if sources else ""
    )


def describe_unwritten(operation: Unwritten, explanation: Explanation) -> str:
    """Return which values were computed from uninitialized memory, and where it is allocated and read."""
    subject = name_subject(explanation.subject)
    memory = f"memory of shape {_format_shape(operation.shape)} that nothing has written"
    where = f"allocated{name_site(operation.allocated_at)}, read{name_site(operation.read_at)}"
    return f"{subject} {subject.be} computed from {memory} on {format_ranks(operation.ranks)}: {where}"


def describe_miscounted(operation: Miscounted, explanation: Explanation) -> str:
    """Return how many choices of experts a rank counts, compared with the expected number."""
    padding = ": padding tokens count too" if explanation.cause is Cause.PADDING else ""
    count = len(explanation.subject.tensors)
    routers = f" of each of {count} routers" if count > 1 else ""
    if operation.actual == operation.expected:
        return (
            f"rank {operation.rank} counts {operation.actual:.0f} choices{routers}, as many as are expected, "
            "but not of the expected experts"
        )
    return (
        f"rank {operation.rank} counts {operation.actual:.0f} choices of experts{routers} where "
        f"{operation.expected:.0f} are expected{padding}"
    )


def describe_redefined(operation: Redefined, explanation: Explanation) -> str:
    """Return the wrong definition of a loss term, with all alternatives that fit equally well."""
    first, *others = (_describe_changes(changes) for changes in operation.variants)
    times = "" if operation.factor is None else f", {describe_factor(operation.factor)}"
    if not others:
        return f"the {operation.term} loss is made of {first}{times}"
    rivals = ", or of ".join((first, *others))
    return f"the {operation.term} loss is made either of {rivals}{times}: the gradients are equal here"


def _describe_changes(changes: Sequence[Change]) -> str:
    return " and of ".join(_REDEFINED[change.part, change.way] for change in changes)


def describe_misplaced(operation: Misplaced, explanation: Explanation) -> str:
    """Return which parameters have a different shape than on one device, with their placement."""
    count = len(explanation.subject.tensors)
    names = explanation.subject.tensors[0] if count == 1 else f"{count} parameters"
    actual, expected = map(_format_shape, (operation.actual, operation.expected))
    sizes = f"the shape {actual} under this layout, {expected} on one device"
    first = "" if count == 1 else f" ({explanation.subject.tensors[0]})"
    if operation.dim is None:
        return f"{names} {'has' if count == 1 else 'have'} {sizes}{first}"
    over = f" over {name_products(operation.axes)}" if operation.axes else ""
    placed = f"placed as parts along dim {operation.dim}{over}, and every rank holds as much as the whole"
    return f"{names} {'is' if count == 1 else 'are'} {placed}: {sizes}{first}"


def _format_shape(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))})"


def name_site(site: str) -> str:
    """Return the call site of a collective, without the install folder of its package."""
    return f" at {re.sub(r'^.*/(site|dist)-packages/', '', site)}" if site else ""
