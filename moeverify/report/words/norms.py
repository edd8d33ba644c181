"""Sentences on gradient norms."""

from __future__ import annotations

from moeverify.report.words.factor import name_products
from moeverify.report.words.part import name_part
from moeverify.results.explanation import Explanation
from moeverify.results.operation import (
    NormOfSlices,
    Scaled,
)
from moeverify.results.part import Part


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
        how = f"{scale} times the right one, as of gradients that still have a scale of the loss of {scale}"
    else:
        how = (
            f"1/{scale} of the right one, as of gradients that were divided by a scale of the loss once more"
        )
    return f"the gradients match, and the gradient norm is {how}"
