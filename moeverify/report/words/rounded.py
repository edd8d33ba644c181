"""Words for values rounded to a narrower dtype, or off by its rounding error."""

from __future__ import annotations

from moeverify.report.words.subject import name_subject
from moeverify.results.explanation import Explanation, Quantity
from moeverify.results.operation import Rounded


def describe_rounded(operation: Rounded, explanation: Explanation) -> str:
    """Return the rounded quantity, its dtype, and the first module where it was rounded."""
    subject = name_subject(explanation.subject)
    module = explanation.subject.module
    is_tensor = explanation.subject.quantity not in (Quantity.OUTPUT, Quantity.MODULE_GRADIENT)
    first = f", first in {module}" if module and is_tensor else ""
    if operation.is_representable:
        hold = subject.pick("holds", "hold")
        other = "what was saved" if explanation.subject.quantity is Quantity.LOADED else "the golden"
        return (
            f"{subject} {hold} only values that {operation.dtype} can represent, and {other} does not{first}"
        )
    return f"{subject} {subject.be} off by about the rounding of {operation.dtype}, in no direction{first}"
