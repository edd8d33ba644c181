"""Sentences about the kinds of wrong operations: counts, places, weights, norms, rounding, lost elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moeverify.report.words.factor import describe_factor, name_products
from moeverify.report.words.part import name_part
from moeverify.report.words.subject import MODEL, name_culprit, name_subject
from moeverify.results.cause import Cause
from moeverify.results.explanation import Explanation, Quantity
from moeverify.results.operation import (
    Altered,
    Miscounted,
    Misplaced,
    NormOfSlices,
    Rounded,
    Scaled,
)
from moeverify.results.part import Part


def describe_miscounted(operation: Miscounted, explanation: Explanation) -> str:
    """Return how many choices of experts a rank counts, compared with the expected number."""
    count = len(explanation.subject.tensors)
    routers = f" of each of {count} routers" if count > 1 else ""
    if operation.actual == operation.expected:
        return (
            f"rank {operation.rank} counts {operation.actual:.0f} choices{routers}, the expected number, but "
            "for other experts than expected"
        )
    return (
        f"rank {operation.rank} counts {operation.actual:.0f} choices of experts{routers} where "
        f"{operation.expected:.0f} are expected"
        + (": those of padding, too" if operation.counts_padding else "")
    )


def describe_misplaced(operation: Misplaced, explanation: Explanation) -> str:
    """Return which parameters have a different shape than on one device, with their placement."""
    count = len(explanation.subject.tensors)
    names = explanation.subject.tensors[0] if count == 1 else f"{count} parameters"
    actual, expected = map(_format_shape, (operation.actual, operation.expected))
    sizes = f"the shape {actual} under this layout, {expected} on one device"
    first = "" if count == 1 else f" ({explanation.subject.tensors[0]})"
    has = "has" if count == 1 else "have"
    if operation.dim is None:
        pairs = zip(operation.actual, operation.expected, strict=False)
        has_dims = len(operation.actual) == len(operation.expected)
        is_part = has_dims and all(here <= there for here, there in pairs)
        values = "values that no block of the tensor on one device has: " if is_part else ""
        return f"{names} {has} {values}{sizes}{first}"
    over = f" over {name_products(operation.axes)}" if operation.axes else ""
    placed = f"placed as parts along dim {operation.dim}{over}, but every rank holds the size of the whole"
    return f"{names} {'is' if count == 1 else 'are'} {placed}: {sizes}{first}"


def _format_shape(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))})"


def describe_weights(operation: Scaled) -> str:
    """Return the rule for the weights of the batch's shares, if it is known."""
    terms = [term for term in dict.fromkeys(each.part.term for each in operation.contributions) if term]
    about = f" in the {' and the '.join(terms)} loss" if terms else ""
    scale = "" if operation.means_factor is None else f", {describe_factor(operation.means_factor)}"
    return (
        f"mean of means{about}: each of the {operation.local_means} data shards is divided by its own number of "
        f"valid tokens{scale}"
    )


def describe_norm_of_slices(operation: NormOfSlices, explanation: Explanation) -> str:
    """Return the axis over which squares are not summed, and how the ranks' norms are combined instead."""
    over = name_products(operation.axes)
    squares = "the squares" + (
        f" of {name_part(Part(group=operation.group))}" if operation.group is not None else ""
    )
    if operation.combination == "own":
        return (
            f"the gradients match, and {squares} are not summed over {over}: "
            "each rank's gradient norm counts only those of the ranks at its own coordinate"
        )
    if operation.combination == "one":
        place = "one coordinate" if operation.coordinate is None else f"coordinate {operation.coordinate}"
        return (
            f"the gradients match, and {squares} are not summed over {over}: "
            f"the gradient norm of all ranks counts only those of the ranks at {place}"
            + (", where it is largest" if operation.is_largest else "")
        )
    value = {
        "mean": "the mean of",
        "sum": "the sum of",
        "root-mean-square": "the root of the mean square of",
    }[operation.combination]
    made = f"the gradient norm is {value} the norms at each coordinate"
    if operation.is_apart:
        made = f"their part of the gradient norm is the square of {value} their norms at each coordinate"
    return f"the gradients match, and {squares} are not summed over {over}: {made}"


def describe_loss_scale(operation: Scaled) -> str:
    """Return that a norm was computed from gradients that still contain, or lack, a loss scale."""
    scale = 2 ** abs(operation.loss_scale)
    if operation.loss_scale > 0:
        how = f"{scale} times the right one, as if the gradients still had the loss scale {scale}"
    else:
        how = f"1/{scale} of the right one, as if the gradients were divided by the loss scale twice"
    return f"the gradients match, and the gradient norm is {how}"


def describe_rounded(operation: Rounded, explanation: Explanation) -> str:
    """Return the rounded quantity, its dtype, and the first module where it was rounded."""
    subject = name_subject(explanation.subject)
    module = explanation.subject.module
    is_tensor = explanation.subject.quantity not in (Quantity.OUTPUT, Quantity.MODULE_GRADIENT)
    first = f", first in {module}" if module and is_tensor else ""
    hold = subject.pick("holds", "hold")
    other = "what was saved" if explanation.subject.quantity is Quantity.LOADED else "the golden"
    return f"{subject} {hold} only values that {operation.dtype} can represent, and {other} does not{first}"


def describe_altered(operation: Altered, explanation: Explanation) -> str:
    """Return where a computation diverges, for an operation whose formula is unknown."""
    subject = explanation.subject
    names = {
        "module": name_culprit(subject),
        "tensors": ", ".join(subject.tensors) or subject.module or MODEL,
        "subject": name_subject(subject),
    }
    if operation.first_micro_batch:
        text = (
            "{module} matches in the first micro-batch and diverges from micro-batch {first} on: something that "
            "changes once a step changed between them"
        )
        return text.format(first=operation.first_micro_batch, **names)
    if subject.quantity is Quantity.MODULE_GRADIENT and subject.tensors:
        return f"first divergence in backward: {name_subject(subject)} (no gradient was right before it)"
    text = _ALTERED_CAUSES.get(explanation.cause) or _ALTERED[subject.quantity]
    if explanation.cause is Cause.METRIC and subject.quantity in _REPORTED:
        text = "only the report of {tensors} is wrong: the output of its block matches"
    if not operation.inputs_seen:
        text = text.replace(_MATCH, _UNSEEN)
    if operation.is_no_number:
        text = text.replace(_DIFFERS, _IS_NO_NUMBER)
    return text.format(**names)


_REPORTED = (Quantity.EXPERT_CHOICE, Quantity.ROUTING_WEIGHT)
_MATCH, _UNSEEN = "inputs match", "inputs are not known to match"
_DIFFERS, _IS_NO_NUMBER = "does not)", "has values that are no numbers)"


_ALTERED_CAUSES: Mapping[Cause, str] = {
    Cause.NONDETERMINISM: "two runs of the same layout differ: something in it is not deterministic",
    Cause.ROUTING: "{tensors} chooses other experts (inputs match)",
    Cause.METRIC: (
        "only a reported number is wrong: {subject} is no multiple of the expected value; the gradients match"
    ),
}
_ALTERED: Mapping[Quantity, str] = {
    Quantity.OUTPUT: "first divergence: {module} (inputs match, output does not)",
    Quantity.MODULE_GRADIENT: (
        "first divergence in backward: {module} (its output gradient matches, its input gradient does not)"
    ),
    Quantity.LOSS: "{subject} is computed differently (routing and module outputs match)",
    Quantity.ROUTING_WEIGHT: "{tensors} weights its choice differently (inputs match)",
    Quantity.BUFFER: "{subject} changed differently than on one device",
    Quantity.LOADED: "{subject} has neither the saved values nor those of another known tensor",
}
