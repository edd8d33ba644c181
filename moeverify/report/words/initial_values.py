"""What initial values are, in words: which rule of each weight's shape scales them, or how they were drawn."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.report.words.factor import AMBIGUOUS, format_factor, name_product
from moeverify.report.words.subject import name_subject
from moeverify.results.explanation import Explanation
from moeverify.results.initial_values import Draw, Drawn, InitialSource, ScaledByShape, Spread, Tails

_SAME = 0.01


def describe_scaled_by_shape(operation: ScaledByShape, explanation: Explanation) -> str:
    """Return by which sizes of its own each weight is scaled, and how far apart the factors are."""
    subject = name_subject(explanation.subject)
    names = " = ".join(name_product(product) for product in operation.products)
    ambiguous = f" {AMBIGUOUS}" if len(operation.products) > 1 else ""
    rule = f"the root of {names}" if operation.power > 1 else names
    return (
        f"{subject} {subject.be} {rule}{ambiguous} times the expected values, each by the shape of its own weight: "
        f"from {format_factor(operation.least)} to {format_factor(operation.largest)} times"
    )


_COLUMNS, _ROWS, _BOTH = "columns of the weight", "rows of the weight", "rows and columns of the weight"

# By the distribution, what is over the product, and the product.
_KNOWN_AS: Mapping[tuple[str, float, tuple[str, ...]], str] = {
    ("uniform", 1.0, (_COLUMNS,)): "torch's default for linear layers",
    ("uniform", 3.0, (_COLUMNS,)): "LeCun's initialization",
    ("uniform", 6.0, (_COLUMNS,)): "Kaiming's initialization",
    ("uniform", 6.0, (_ROWS,)): "Kaiming's initialization by the fan-out",
    ("uniform", 6.0, (_BOTH,)): "Xavier's initialization",
    ("normal", 1.0, (_COLUMNS,)): "LeCun's initialization",
    ("normal", 2.0, (_COLUMNS,)): "Kaiming's initialization",
    ("normal", 2.0, (_ROWS,)): "Kaiming's initialization by the fan-out",
    ("normal", 2.0, (_BOTH,)): "Xavier's initialization",
}


def describe_drawn(operation: Drawn, explanation: Explanation) -> str:
    """Return how initial values are distributed that are not those of the seed and the names."""
    subject = name_subject(explanation.subject)
    if operation.tails is not None:
        return _describe_tails(operation.tails, str(subject))
    if operation.spread is not None:
        return f"{subject} {_describe_spread(operation.spread)}"
    texts = ", or ".join(_describe(draw, operation.source) for draw in operation.draws)
    return f"{subject} {subject.be} {texts}, and not {name_right(operation.source, subject.pick('name', 'names'))}"


def name_right(source: InitialSource, names: str = "name") -> str:
    """Return which initial values are right: those of their source, as an object of a sentence."""
    if source == "factory":
        return "those of the model that `recipe.model.factory` makes"
    return (
        "those of the folder of weights"
        if source == "weights"
        else f"those that the seed and the {names} give"
    )


def _describe_spread(spread: Spread) -> str:
    """Return around which number values lie, which other tensors are so, and what is right."""
    right = (
        f"the right ones lie around {spread.right_mean:.3g} with a deviation of {spread.right_deviation:.3g}"
    )
    others = ""
    if spread.like:
        more = spread.num_like - len(spread.like)
        names = ", ".join(spread.like) + (f" and {more} more" if more else "")
        others = f", as the right ones of {names} do"
    return f"lie around {spread.mean:.3g} with a deviation of {spread.deviation:.3g}{others}; {right}"


_TAILS = {
    "drawn-again": "drawn again within that bound, as of a truncated distribution",
    "cut-off": "cut off there",
    "zero": "zero",
}


def _describe_tails(tails: Tails, subject: str) -> str:
    """Return which of initial values are others, and what all others are."""
    bound = "a bound of each weight's own"
    if tails.deviations is not None:
        bound = f"{tails.deviations:g} deviations"
    elif tails.bound is not None:
        bound = f"{tails.bound:.3g}"
    factor = "right" if abs(tails.factor - 1.0) < _SAME else f"{tails.factor:.4g} times the right ones"
    return (
        f"{subject} beyond {bound} are {_TAILS[tails.way]}: {tails.num_beyond} of {tails.num_elements}, "
        f"and all others are {factor}"
    )


def _describe(draw: Draw, source: InitialSource) -> str:
    if draw.distribution == "right":
        return f"distributed as they should be{', as of another seed' if source == 'seed' else ''}"
    if draw.distribution == "constant":
        return f"all {format_factor(draw.number or 0.0)}"
    if draw.distribution in ("identity", "orthogonal"):
        matrix = "an identity" if draw.distribution == "identity" else "an orthogonal matrix"
        times = "" if abs((draw.number or 0.0) - 1.0) < _SAME else f"{draw.number:.4g} times "
        return f"{times}{matrix}"
    size = _name_size(draw)
    known = _KNOWN_AS.get((draw.distribution, draw.times, draw.over), "") if draw.number is None else ""
    if draw.distribution == "normal" and draw.number is not None and abs(draw.number - 1.0) < _SAME:
        known = "torch's default for embeddings"
    known = f", as in {known}" if known and not draw.cut else ""
    if draw.distribution == "uniform":
        return f"uniform in +-{size}{known}"
    if not draw.cut:
        return f"normal with deviation {size}{known}"
    when = "after" if draw.is_after_cut else "before"
    return f"normal, cut at {draw.cut} deviations, with deviation {size} {when} the cut"


def _name_size(draw: Draw) -> str:
    """Return a bound or a deviation: a number, or the root of a quotient."""
    if draw.number is not None:
        return f"{draw.number:.2g}"
    product = " * ".join(draw.over)
    product = f"({product})" if len(draw.over) > 1 else product
    return f"1/root of {product}" if draw.times == 1.0 else f"the root of {draw.times:g}/{product}"
