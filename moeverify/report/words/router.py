"""Words for the rules by which routers choose and weigh experts."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.results.facts import ChoiceRule, WeightRule

RULES: Mapping[ChoiceRule | WeightRule, str] = {
    "masked-by-zero": (
        "masks the experts of groups that it does not take by a score of zero, and not by minus infinity: "
        "they are chosen where others are below zero"
    ),
    "without-groups": "chooses its experts from all groups, not from the best ones alone",
    "groups-by-best": "rates groups of experts by their best expert, not by their best two",
    "groups-by-two": "rates groups of experts by their best two experts, not by the best one",
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
"""By rule what a router does."""
