"""Ambiguities in words: the layout that would resolve one, and the result under that layout."""

from __future__ import annotations

from moeverify.report.words.cause import describe_explanation
from moeverify.report.words.factor import name_product
from moeverify.results.finding import FollowUp


def describe_follow_up(question: FollowUp) -> str:
    """Return the layout that would resolve an ambiguity, or the result under it."""
    layout = "{" + ", ".join(f"{name}: {value}" for name, value in question.layout.items()) + "}"
    names = [name_product(product) for product in question.candidates] or list(question.axes)
    seen = describe_explanation(question.seen) if question.seen is not None else "nothing differs"
    if question.outcome == "narrowed":
        left = " or ".join(name_product(product) for product in question.left)
        return f"{left}: under {layout}, {seen}"
    if question.outcome == "none-left":
        return f"none of {', '.join(names)}: under {layout}, {seen}"
    if question.outcome == "not-shown":
        return f"not decided: under {layout}, {question.reason or seen}"
    if question.outcome == "not-run":
        return f"not decided: the layout {layout} did not run: {question.reason}"
    return question.answer or f"layout {layout} separates {' and '.join(names)}"


def name_candidates(question: FollowUp) -> str:
    """Return the first two candidates that a layout separates: `ep and dp_replicate`."""
    names = [name_product(product) for product in question.candidates] or list(question.axes)
    return " and ".join(names[:2])
