"""Sentences on how a loss weighs its tokens."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.report.numbers import format_range
from moeverify.report.words.cross_entropy import describe_variant
from moeverify.report.words.factor import describe_sources, format_factor
from moeverify.report.words.subject import name_subject
from moeverify.results.explanation import Explanation
from moeverify.results.token_weights import (
    Averaging,
    Dependence,
    GroupUnit,
    Reaveraged,
    TokenCount,
    TokenGroups,
    TokenSet,
)

_ONE: Mapping[GroupUnit, str] = {
    "batch": "batch",
    "row": "row",
    "row-of-rank": "part of a row",
    "position": "position",
    "rank": "rank",
    "micro-batch": "micro-batch of a rank",
    "same-micro-batch": "micro-batch",
    "chunk": "chunk of {} tokens",
    "chunk-by-position": "chunk of {} tokens in order of positions",
    "chunk-of-row": "chunk of {} positions of its row",
    "chunk-of-positions": "chunk of {} positions",
}
_OF_ALL_RANKS = " (of all ranks')"
"""What the number of a micro-batch counts."""

_OF_ROWS: tuple[GroupUnit, ...] = ("chunk-of-row", "chunk-of-positions")
_MEANS = ("valid", "all", "size")
_COUNTED: Mapping[str, str] = {
    "valid": "the valid tokens",
    "all": "all tokens, padding among them,",
    "size": "the size",
    "rows": "the rows",
    "valid-less-rows": "the valid tokens less one for each row",
    "all-less-rows": "all tokens less one for each row",
    "root-of-valid": "the root of the valid tokens",
}
_KEYS: Mapping[Dependence, str] = {
    "position": "its position",
    "row": "its row",
    "label": "its label",
    "token": "its token",
}


def describe_reaveraged(operation: Reaveraged, explanation: Explanation) -> str:
    """Return how the loss is averaged, or each of the ways that give the same."""
    loss = name_subject(explanation.subject)
    texts = [_describe(each) for each in operation.averagings]
    if operation.changes:
        formula = describe_variant(operation.changes)
        texts = [f"{formula}; it {each}" for each in texts] or [formula]
    texts = [f"{each}, and weighs its tokens otherwise" for each in texts] if operation.is_weighed else texts
    first, *others = texts
    rivals = ", or ".join(f"it {each}" for each in others)
    text = f"either {loss} {first}, or {rivals}: the weights are equal here" if others else f"{loss} {first}"
    return f"only a reported number is wrong: {text}; the gradients match" if operation.is_reported else text


def _describe(averaging: Averaging) -> str:
    if averaging.depends_on is not None:
        return f"counts each token by a weight that {_KEYS[averaging.depends_on]} alone tells"
    if averaging.divisor is not None:
        divisor, valid = averaging.divisor
        return f"is divided by {divisor}, and not by the {valid} valid tokens of the batch"
    if averaging.only is not None:
        return _describe_only(averaging.only, averaging.over)
    parts = [_describe_set(averaging.without)] if averaging.without is not None else []
    parts += _describe_counts(averaging)
    return ", and ".join(parts)


def _describe_counts(averaging: Averaging) -> list[str]:
    over, times, factor = averaging.over, averaging.times, averaging.factor
    is_groups = factor is not None and any("groups" in each.sources for each in factor.equals)
    scale = ""
    if factor is not None and not is_groups:
        sources = describe_sources(factor)
        scale = f", {format_factor(factor.value)} times" + (f" ({sources})" if sources else "")
    if over is not None and over.groups.unit == "batch" and averaging.without is not None:
        return ["divides by the valid tokens that are left"]
    if over is not None and times is None:
        is_of_own = over.of in _MEANS and over.whose == "own" and over.groups.unit != "batch"
        kind = f"is {'a mean' if is_groups else 'a sum'} of means" if is_of_own else "has another divisor"
        times_groups = (
            f" times the number of {_name_groups(over.groups)}s" if is_groups and not is_of_own else ""
        )
        divided = f"each token is divided by {_name_count(over)}{times_groups}"
        return [f"{kind}: {divided}, and not by the valid tokens of the batch{scale}"]
    if (
        over is not None
        and times is not None
        and times.of == "valid"
        and factor is None
        and over.of in _MEANS
    ):
        share = (
            f"multiplied by the share of its {_name_groups(times.groups)} in the valid tokens of the batch"
        )
        return [f"is a sum of means: each token is divided by {_name_count(over)}, and {share}"]
    if over is not None and times is not None:
        return [f"counts each token by {_name_count(times)} over {_name_count(over)}{scale}"]
    if times is not None:
        mean = " over their mean" if is_groups else ""
        return [f"counts each token by {_name_count(times)}{mean}{scale}"]
    return (
        [f"counts all others {format_factor(factor.value)} times ({describe_sources(factor)})"]
        if factor
        else []
    )


def _describe_only(tokens: TokenSet, over: TokenCount | None) -> str:
    """Return which tokens alone are in a loss, and what divides them."""
    is_of_all = tokens.groups.unit == "micro-batch"
    unit = "micro-batch" if is_of_all else _ONE[tokens.groups.unit]
    number = format_range(tokens.numbers) + (_OF_ALL_RANKS if is_of_all else "")
    is_own = tokens.which == "own"
    which = f"each {unit}'s own tokens" if is_own else f"the tokens of {unit} {number}"
    if over is None:
        divided = "divided by the valid tokens of the batch"
    else:
        divided = "their mean" if over.of == "valid" else "divided by all of them, padding among them"
    return f"is that of {which} alone, {divided}"


def _name_count(count: TokenCount) -> str:
    """Return `the valid tokens of its chunk of 32 tokens`."""
    if count.of == "groups":
        assert count.inside is not None
        return f"the number of {_name_groups(count.groups)}s of its {_name_groups(count.inside)}"
    groups = _name_groups(count.groups)
    whose = {
        "own": "the batch" if count.groups.unit == "batch" else f"its {groups}",
        "before": f"the {groups} before its own",
        "largest": f"the {groups} that has most",
        "smallest": f"the {groups} that has fewest",
    }.get(count.whose, f"the {count.whose} {groups}")
    return f"{_COUNTED[count.of]} of {whose}"


def _name_groups(groups: TokenGroups) -> str:
    return _ONE[groups.unit].format(groups.size)


def _describe_set(tokens: TokenSet) -> str:
    verb = "leaves out" if tokens.times == 0.0 else f"counts {format_factor(tokens.times)} times"
    unit = tokens.groups.unit
    if unit == "row" and tokens.which == "last":
        return f"{verb} the last valid token of each row"
    if tokens.which == "numbers":
        several = len(tokens.numbers) > 1
        numbers = format_range(tokens.numbers)
        if unit == "micro-batch":
            return f"{verb} micro-batch{'es' if several else ''} {numbers}{_OF_ALL_RANKS}"
        return f"{verb} {_ONE[unit]}{'s' if several else ''} {numbers}"
    if tokens.which == "every":
        period, place = tokens.numbers
        what = "positions of each rank's part of a row" if unit in _OF_ROWS else "tokens of each micro-batch"
        return f"{verb} every one of {period} {what}, that at place {place}"
    (count,) = tokens.numbers
    what = "positions" if unit in _OF_ROWS else "tokens"
    what = what[:-1] if count == 1 else what
    number = "" if count == 1 else f"{count} "
    of = (
        "in order of positions, of each micro-batch" if unit == "chunk-by-position" else "of each micro-batch"
    )
    of = "of each rank's part of a row" if unit in _OF_ROWS else of
    return f"{verb} the {tokens.which} {number}{what} {of}"
