"""Sentences about gradient norms and the clip coefficients computed from them."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.report.words.factor import describe_sources, format_factor, name_products
from moeverify.report.words.part import name_part
from moeverify.results.explanation import Explanation
from moeverify.results.formula_names import NormOrder
from moeverify.results.norm_powers import NormOfPowers, NormPart, PartNumber
from moeverify.results.operation import (
    NormOfNorms,
    NormOfOrder,
    NormOfPartials,
    NormOfSlices,
    Reclipped,
    Scaled,
)
from moeverify.results.part import Part


def describe_norm_of_norms(operation: NormOfNorms, explanation: Explanation) -> str:
    """Return the groups whose norms were combined into a norm of norms."""
    groups = [name_part(Part(group=group)) for group in operation.groups]
    parts = f"the norms of {' and of '.join(groups)}" if groups else "the norms of all parameters"
    value = "sum" if operation.combination == "sum" else "largest"
    return (
        f"the gradients match, and the gradient norm is the {value} of {parts}, not the root of their squares"
    )


_ORDERS: Mapping[NormOrder, str] = {
    "absolute": "the sum of the absolute gradients, a norm of order 1 and not 2",
    "absolute-apart": (
        "made of the sums of the absolute gradients of experts and of all others, norms of order 1 and not 2"
    ),
    "largest": "the largest absolute gradient, a norm of order infinity and not 2",
    "squares": "the sum of the squares, without its root",
    "mean-square": "the root of the mean square of all elements, and not of their sum",
    "mean-absolute": "the mean of the absolute gradients",
    "root": "the root of the right one",
    "clipped": "that of the gradients after the clip, which is its limit",
}


def describe_norm_of_order(operation: NormOfOrder, explanation: Explanation) -> str:
    """Return the other statistic of the gradients that was reported as the norm."""
    return f"the gradients match, and the gradient norm is {_ORDERS[operation.order]}"


_POWERS: Mapping[float, str] = {
    0.5: "the roots of ",
    1.0: "",
    2.0: "the squares of ",
    4.0: "the fourth powers of ",
}
_POWER: Mapping[float, str] = {
    0.25: "the fourth root of ",
    0.5: "the root of ",
    1.0: "",
    2.0: "the square of ",
    4.0: "the fourth power of ",
}
_OF_ALL: Mapping[PartNumber, str] = {
    "norm": "the right one",
    "absolute": "the sum of the absolute gradients",
    "largest": "the largest absolute gradient",
    "mean-square": "the root of the mean square of all elements",
    "mean-absolute": "the mean of the absolute gradients",
}
_OF_EACH: Mapping[PartNumber, str] = {
    "norm": "the norms",
    "absolute": "the sums of absolute gradients",
    "largest": "the largest absolute gradients",
    "mean-square": "the roots of the mean squares",
    "mean-absolute": "the means of absolute gradients",
}


_PARTS: Mapping[NormPart, str] = {
    "parameter": "all parameters",
    "module": "all modules",
    "layer": "each layer and of all else",
}


def describe_norm_of_powers(operation: NormOfPowers, explanation: Explanation) -> str:
    """Return the parts and statistics that a wrong norm combines, with their powers and roots."""
    if operation.part == "all":
        made = f"{_POWER[1.0 / operation.root]}{_OF_ALL[operation.number]}"
    else:
        each = f"{_POWERS[operation.power]}{_OF_EACH[operation.number]} of {_PARTS[operation.part]}"
        value = "largest" if operation.is_largest else "mean" if operation.is_mean else "sum"
        made = f"{_POWER[1.0 / operation.root]}the {value} of {each}"
    times = ""
    if operation.factor is not None:
        times = f"{format_factor(operation.factor.value)} times "
    sources = f"; {describe_sources(operation.factor)}" if operation.factor is not None else ""
    is_right = operation.part == "all" and made == _OF_ALL["norm"]
    instead = "" if is_right else ", and not the root of the sum of all squares"
    return f"the gradients match, and the gradient norm is {times}{made}{instead}{sources}"


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


def describe_norm_of_partials(operation: NormOfPartials, explanation: Explanation) -> str:
    """Return which gradients a norm counts before their reduction, and how."""
    count, over = len(operation.tensors), name_products(operation.axes)
    gradients = f"the gradient of {operation.tensors[0]}" if count == 1 else f"{count} gradients"
    how = {
        "norms": "as the sum of the norms of the ranks' parts",
        "squares": "by the squares of the ranks' parts",
        "own": "by each rank's own part alone",
    }
    summed = f"before {'it is' if count == 1 else 'they are'} summed over {over or 'ranks'}"
    return f"the gradients match, and the gradient norm counts {gradients} {how[operation.combination]}, {summed}"


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


def describe_reclipped(operation: Reclipped, explanation: Explanation) -> str:
    """Return the formula by which a wrong clip coefficient was computed."""
    coefficient = "the gradient norm matches, and the clip coefficient"
    guard, factor = "the small number that guards its division", operation.factor
    if factor is not None and operation.way == "limit":
        times = f"{format_factor(factor.value)} times the right one ({describe_sources(factor)})"
        return f"{coefficient} is made of a limit that is {times}"
    if factor is not None and factor.is_zero:
        return f"{coefficient} lacks {guard}"
    if factor is not None:
        sources = f" ({describe_sources(factor)})" if factor.equals else ""
        return f"{coefficient} adds {guard} {format_factor(factor.value)} times{sources}"
    return f"{coefficient} {_FORMULAS[operation.way]}"


_FORMULAS: Mapping[str, str] = {
    "unbounded": "is not bounded by 1: small gradients are made larger",
    "without-limit": "is 1 over the norm, without the limit",
    "squared": "is the square of the right one, as if gradients were clipped twice",
    "of-squared-norm": "divides by the squared norm",
    "root": "is the root of the right one",
    "inverse": "is 1 over the right one",
    "soft": "is the limit over the sum of norm and limit, without a bound of 1",
    "limit-squared": "is made of the square of the limit",
    "of-root-norm": "divides by the root of the norm",
}
