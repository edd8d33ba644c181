"""A module that computes its formula with a part otherwise, in words, with all variants that fit as well."""

from __future__ import annotations

from moeverify.report.words.factor import describe_factor
from moeverify.report.words.subject import name_culprit
from moeverify.report.words.variant import describe_restriction, describe_variant
from moeverify.results.explanation import Explanation
from moeverify.results.operation import Varied

MOST_RIVALS = 3


def describe_varied(operation: Varied, explanation: Explanation) -> str:
    """Return what a module computes, or each of what it may compute."""
    inner = explanation.subject.inner
    first, *others = (
        # What a block hands to a module in the middle is not all that it computes.
        describe_variant(
            f"input:{inner}" if inner and operation.formula == "branches" else operation.formula, changes
        )
        for changes in operation.variants
    )
    where = describe_restriction(operation.ranks, operation.blocks, operation.tokens)
    culprit = name_culprit(explanation.subject)
    if operation.factor is not None:
        all_of_it = f"all that it puts out is {describe_factor(operation.factor)}"
        others = [*others, all_of_it]
    if not others:
        return f"{culprit} {first}{where}"
    named = others[:MOST_RIVALS]
    left_out = len(others) - len(named)
    named += [f"does one of {left_out} other things"] if left_out else []
    rivals = ", or ".join(each if each.startswith("all ") else f"it {each}" for each in named)
    return f"either {culprit} {first}, or {rivals}{where}: the outputs are equal here"
