"""What initial values are, in words: which rule of each weight's shape scales them."""

from __future__ import annotations

from moeverify.report.words.factor import AMBIGUOUS, format_factor, name_product
from moeverify.report.words.subject import name_subject
from moeverify.results.explanation import Explanation
from moeverify.results.initial_values import ScaledByShape


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
