"""Words for the rules by which routers choose experts and compute weights."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.results.facts import RouterFacts

WAYS: Mapping[str, str] = {
    "masked-by-zero": (
        "masks the experts of groups that it does not take by a score of zero, and not by minus infinity: "
        "they are chosen where others are below zero"
    ),
    "without-groups": "chooses its experts from all groups, not from the best ones alone",
    "groups-by-best": "rates groups of experts by their best expert, not by their best two",
    "groups-by-two": "rates groups of experts by their best two experts, not by the best one",
    "groups-by-worst": "rates groups of experts by their worst expert",
    "worst": "chooses the experts with the lowest scores",
    "of-token-before": "gives each token the choice of the token before it",
    "of-token-after": "gives each token the choice of the token after it",
    "bias-twice": "adds the selection bias twice",
    "bias-on-logits": "adds the selection bias to its logits, before they become scores",
    "chosen-by-logits": "chooses its experts by its logits, not by their scores",
    "chosen-by-other-score": "chooses its experts by the other score, softmax for sigmoid or sigmoid for softmax",
    "scores-again": "weighs its experts by scores that it makes of its scores once more",
    "logits-as-weights": "weighs its experts by its logits, not by their scores",
    "other-temperature": "multiplies its logits by {:.6g} before it makes scores of them",
    "bias-in-logits": "weighs its experts by scores of logits with the selection bias",
    "equal-weights": "weighs the experts of a token equally",
    "softmax-of-chosen": "weighs its experts by a softmax of the chosen logits",
    "softmax-of-chosen-scores": "weighs its experts by a softmax of the chosen scores",
    "divided-by-root-of-squares": "divides the weights of a token's experts by the root of the sum of their squares",
    "divided-by-best": "divides the weights of a token's experts by the largest one",
    "divided-by-one-more": "divides the weights of a token's experts by a sum that has one more expert's score",
    "divided-by-all": "divides the weights of a token's experts by the sum of the scores of all experts",
    "other-epsilon": "adds {:.5g} to the sum that it divides weights by",
    "other-scale": "multiplies its weights by {:.6g}, which is not the recipe's scale",
    "divided-by-scale": "divides its weights by their scale, where it should multiply",
    "weights-reversed": "gives the weights of a token's experts to them in the reverse order",
    "weights-by-id": "gives the weights of a token's experts to them in the order of the experts' numbers",
    "weights-of-token-before": "gives each token the weights of the token before it",
    "sum-of-group": "rates groups of experts by the sum of all of their scores",
    "groups-without-bias": "rates groups of experts without the selection bias",
    "experts-without-bias": "chooses experts inside of groups without the selection bias",
    "without-bias": "chooses its experts without the selection bias",
    "opposite-bias": "chooses its experts with the opposite of the selection bias",
    "softmax-scores": "weighs its experts by a softmax of its logits, not by their sigmoid",
    "sigmoid-scores": "weighs its experts by the sigmoid of its logits, not by their softmax",
    "normalized": "divides the weights of a token's experts by their sum",
    "not-normalized": "does not divide the weights of a token's experts by their sum",
    "of-chosen": (
        "weighs its experts by a softmax of the chosen logits alone, or by scores that are divided by their sum, "
        "which is the same"
    ),
    "of-allowed": "weighs its experts by a softmax over the experts of the groups that it takes alone",
    "scale-twice": "applies the scale of its weights twice",
    "without-scale": "leaves out the scale of its weights",
    "with-bias": "weighs its experts by scores with the selection bias",
}
"""Descriptions of wrong routing rules, by their names."""

_GROUPS, _BEST = "groups-", "best-"


def describe_rules(facts: RouterFacts) -> str:
    """Return the rule by which a router chose or weighted, with equally good alternatives."""
    rules = (facts.rule or "", *facts.rivals)
    first, *rest = (_describe_rule(rule, facts.numbers.get(rule)) for rule in rules)
    return f"either {first}, or {', or '.join(rest)}: the numbers are equal here" if rest else first


def _describe_rule(rule: str, number: float | None) -> str:
    *first, last = (_describe_way(way, number) for way in rule.split("+"))
    return f"{', '.join(first)} and {last}" if first else last


def _describe_way(way: str, number: float | None) -> str:
    count = way.removeprefix(_GROUPS)
    if way.startswith(_GROUPS) and count.isdigit():
        return f"takes the best {count} groups of experts, another number than the recipe's"
    if way.startswith(_BEST):
        return _describe_numbers(way.removeprefix(_BEST), number)
    return WAYS[way].format(number)


def _describe_numbers(numbers: str, right: float | None) -> str:
    """Return how many experts each token has, parsed from `5`, `1-in-2` (choices) or `1-to-5` (by token)."""
    experts, _, choices = numbers.partition("-in-")
    least, _, most = experts.partition("-to-")
    place = "" if right is None else f" in place of {right:.0f}"
    if choices:
        which = "the best expert" if experts == "1" else f"the best {experts} experts"
        return f"gives each token {which} more than once, in {choices} choices"
    if most:
        return f"gives tokens from {least} to {most} of their best experts{place}"
    noun = "expert" if experts == "1" else "experts"
    return f"gives each token its best {experts} {noun}{place}"
