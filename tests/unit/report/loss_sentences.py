"""Explanations with their sentences: how a loss weighs its tokens."""

from __future__ import annotations

from typing import Any

from explanations import explain

from moeverify.results.cause import Cause
from moeverify.results.change import Change
from moeverify.results.explanation import Quantity
from moeverify.results.factor import Factor, Product
from moeverify.results.token_weights import Averaging, Reaveraged, TokenCount, TokenGroups, TokenSet

BATCH, ROW, RANK = TokenGroups(unit="batch"), TokenGroups(unit="row"), TokenGroups(unit="rank")
CHUNK = TokenGroups(unit="chunk", size=32)


def valid(groups: TokenGroups) -> TokenCount:
    return TokenCount(of="valid", groups=groups)


def say(sentence: str, *averagings: Averaging, **fields: Any) -> tuple[Any, str, str]:
    operation = Reaveraged(averagings=averagings, **fields)
    return explain(Cause.SHARE_WEIGHTS, Quantity.LOSS, operation, tensors=("lm",)), sentence, "lm loss"


LOSSES = [
    say(
        "the lm loss is a sum of means: each token is divided by the valid tokens of its chunk of 32 tokens, and "
        "multiplied by the share of its rank in the valid tokens of the batch",
        Averaging(over=valid(CHUNK), times=valid(RANK)),
    ),
    say(
        "the lm loss is a mean of means: each token is divided by the valid tokens of its row, and not by the valid "
        "tokens of the batch",
        Averaging(over=valid(ROW), factor=Factor(value=1 / 16, equals=(Product(over=("groups",)),))),
    ),
    say(
        "the lm loss has another divisor: each token is divided by all tokens, padding among them, of the batch, and "
        "not by the valid tokens of the batch",
        Averaging(over=TokenCount(of="all", groups=BATCH)),
    ),
    say(
        "the lm loss leaves out the last valid token of each row, and divides by the valid tokens that are left",
        Averaging(over=valid(BATCH), without=TokenSet(groups=ROW, which="last", numbers=(1,))),
    ),
    say(
        "either the lm loss is that of the tokens of rank 0 alone, divided by the valid tokens of the batch, or it "
        "counts each token by a weight that its position alone tells: the weights are equal here",
        Averaging(only=TokenSet(groups=RANK, which="numbers", numbers=(0,))),
        Averaging(depends_on="position"),
    ),
    say(
        "only a reported number is wrong: the lm loss is the cross entropy with labels smoothed by 0.1; it is a sum "
        "of means: each token is divided by the valid tokens of its rank, and not by the valid tokens of the batch; "
        "the gradients match",
        Averaging(over=valid(RANK)),
        changes=(Change(part="smoothing", way="all", number=0.1),),
        is_reported=True,
    ),
    (
        explain(
            Cause.SHARE_WEIGHTS,
            Quantity.LOSS,
            Reaveraged(
                averagings=(
                    Averaging(
                        over=TokenCount(of="valid", groups=TokenGroups(unit="chunk", size=32)),
                        times=TokenCount(of="valid", groups=TokenGroups(unit="rank")),
                    ),
                )
            ),
            tensors=("lm",),
        ),
        "the lm loss is a sum of means: each token is divided by the valid tokens of its chunk of 32 tokens, and "
        "multiplied by the share of its rank in the valid tokens of the batch",
        "lm loss",
    ),
    (
        explain(
            Cause.METRIC,
            Quantity.LOSS,
            Reaveraged(
                averagings=(
                    Averaging(
                        only=TokenSet(groups=TokenGroups(unit="micro-batch"), which="numbers", numbers=(1,))
                    ),
                ),
                is_reported=True,
            ),
            tensors=("lm",),
        ),
        "only a reported number is wrong: the lm loss is that of the tokens of micro-batch 1 (of all ranks') alone, "
        "divided by the valid tokens of the batch; the gradients match",
        "lm loss",
    ),
    (
        explain(
            Cause.SHARE_WEIGHTS,
            Quantity.LOSS,
            Reaveraged(
                averagings=(), changes=(Change(part="label", way="of-position", number=1.0),), is_weighed=True
            ),
            tensors=("lm",),
        ),
        "the lm loss is the cross entropy with the label of the position 1 further in the place of each, and "
        "weighs its tokens otherwise",
        "lm loss",
    ),
]
