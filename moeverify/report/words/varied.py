"""A loss that is made by its formula with a part otherwise, in words, with all variants that fit as well."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.report.numbers import format_ranks
from moeverify.report.words.cross_entropy import describe_variant
from moeverify.report.words.subject import name_culprit
from moeverify.results.explanation import Explanation
from moeverify.results.operation import Varied

MOST_RIVALS = 3


def describe_varied(operation: Varied, explanation: Explanation) -> str:
    """Return what a loss is, or each of what it may be."""
    first, *others = map(describe_variant, operation.variants)
    where = _describe_restriction(operation.ranks, operation.tokens)
    culprit = name_culprit(explanation.subject)
    if not others:
        return f"{culprit} {first}{where}"
    named = [f"it {each}" for each in others[:MOST_RIVALS]]
    left_out = len(others) - len(named)
    named += [f"it does one of {left_out} other things"] if left_out else []
    return f"either {culprit} {first}, or {', or '.join(named)}{where}: the outputs are equal here"


def _describe_restriction(ranks: Sequence[int], tokens: tuple[int, int] | None = None) -> str:
    """Return where alone a variant holds: ` on ranks 1, 3 alone`, ` at 8 of 16 tokens alone`; nothing for all."""
    of_ranks = f" on {format_ranks(tuple(ranks))} alone" if ranks else ""
    return of_ranks + ("" if tokens is None else f" at {tokens[0]} of {tokens[1]} tokens alone")
