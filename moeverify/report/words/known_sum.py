"""A sum of known tensors in words: `layers.0 puts out its input + 0.5 times the output of layers.0.mlp`."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.report.numbers import format_ranks
from moeverify.report.words.factor import format_factor
from moeverify.report.words.subject import name_culprit
from moeverify.results.explanation import Explanation, Quantity
from moeverify.results.known_sum import KnownSum, Term


def describe_known_sum(operation: KnownSum, explanation: Explanation) -> str:
    """Return what a module sums."""
    subject = explanation.subject
    is_gradient = subject.quantity is Quantity.MODULE_GRADIENT
    first, *others = (_describe_sum(each, is_gradient=is_gradient) for each in operation.sums)
    verb = "passes back" if is_gradient else "hands to " + subject.inner if subject.inner else "puts out"
    where = f" on {format_ranks(operation.ranks)} alone" if operation.ranks else ""
    text = f"{name_culprit(subject)} {verb} {first}{where}"
    return f"either {text}, or {', or '.join(others)}: these are equal here" if others else text


def _describe_sum(terms: Sequence[Term], *, is_gradient: bool) -> str:
    texts: list[str] = []
    for term in sorted(terms, key=lambda each: each.factor < 0):
        sign = "- " if term.factor < 0 else "+ " if texts else ""
        size = abs(term.factor)
        times = "" if size == 1.0 else f"{format_factor(size)} times "
        texts.append(f"{sign}{times}{_name(term.tensor, is_gradient=is_gradient)}")
    return " ".join(texts)


def _name(tensor: str, *, is_gradient: bool) -> str:
    end, _, module = tensor.partition(":")
    if not module:
        return "what it should be"
    return f"the gradient of the {end} of {module}" if is_gradient else f"the {end} of {module}"
