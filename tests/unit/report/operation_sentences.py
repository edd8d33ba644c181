"""Explanations with their sentences: sums made in another way, parts of another shape, and variants of a formula."""

from __future__ import annotations

from explanations import (
    GRADIENT,
    OUTPUT,
    TP,
    explain,
)

from moeverify.results.cause import Cause
from moeverify.results.change import Change
from moeverify.results.explanation import Quantity
from moeverify.results.operation import (
    Misplaced,
    Misreduced,
    Reweighted,
    Varied,
)

OPERATIONS = [
    (
        explain(
            Cause.LAYOUT,
            Quantity.INITIAL_VALUE,
            Misplaced(expected=(4, 5), actual=(8, 5), dim=0, axes=(TP,)),
            tensors=("bias",),
        ),
        "bias is placed as parts along dim 0 over tp, and every rank holds as much as the whole: the shape (8, 5) "
        "under this layout, (4, 5) on one device",
        "axis tp",
    ),
    (
        explain(
            Cause.LAYOUT,
            Quantity.INITIAL_VALUE,
            Misplaced(expected=(4, 5), actual=(4, 7)),
            tensors=("one.bias", "other.bias"),
        ),
        "2 parameters have the shape (4, 7) under this layout, (4, 5) on one device (one.bias)",
        "",
    ),
    (
        explain(
            Cause.MISSING_REDUCTION,
            GRADIENT,
            Misreduced(
                op="all_reduce", site="/x/site-packages/pack/file.py:7 in add", ranks=(0, 1), axes=(TP,)
            ),
        ),
        "the gradient is summed over ranks 0, 1 in the place of tp: what ranks bring to the all_reduce at "
        "pack/file.py:7 in add sums to the expected value over tp",
        "axis tp",
    ),
    (
        explain(
            Cause.MISSING_REDUCTION,
            GRADIENT,
            Misreduced(op="all_reduce", met=(TP,), combination="max", axes=(TP,)),
        ),
        "the gradient is the largest over tp and not the sum: what ranks bring to the all_reduce sums to the "
        "expected value over tp",
        "axis tp",
    ),
    (
        explain(
            Cause.MISSING_REDUCTION,
            GRADIENT,
            Misreduced(op="broadcast", met=(TP,), combination="copy", axes=(TP,)),
        ),
        "the gradient is a copy of what one rank has over tp and not the sum: what ranks bring to the broadcast sums "
        "to the expected value over tp",
        "axis tp",
    ),
    (
        explain(Cause.SCALE, GRADIENT, Misreduced(op="all_reduce", met=(TP,))),
        "the gradient is reduced once more over tp: the all_reduce adds up what is right on each rank already",
        "axis tp",
    ),
    (
        explain(
            Cause.BACKWARD,
            Quantity.MODULE_GRADIENT,
            Reweighted(rows="moe.experts", way="left-out", num_wrong=162, num_rows=192),
            module="moe",
        ),
        "moe does not pass back the gradients of 162 of the 192 rows that moe.experts takes "
        "(its output gradient matches)",
        "moe",
    ),
    (
        explain(
            Cause.BACKWARD,
            Quantity.MODULE_GRADIENT,
            Reweighted(rows="moe.experts", way="scaled", num_wrong=192, num_rows=192, total=0.5),
            module="moe",
        ),
        "moe sums the gradients of the rows that moe.experts takes by 0.5 times the right weights "
        "(its output gradient matches)",
        "moe",
    ),
    (
        explain(
            Cause.FORWARD,
            OUTPUT,
            Reweighted(rows="moe.experts", way="left-out", num_wrong=54, num_rows=192),
            module="moe",
        ),
        "moe leaves out 54 of the 192 rows that moe.experts returns (inputs match)",
        "moe",
    ),
    (
        explain(
            Cause.FORWARD,
            OUTPUT,
            Reweighted(rows="moe.experts", way="normalized", num_wrong=8, num_rows=8, total=1.0),
            module="moe",
        ),
        "moe sums the rows that moe.experts returns by weights that sum to 1 at each token, which those "
        "of one device do not (inputs match)",
        "moe",
    ),
    (
        explain(
            Cause.FORWARD,
            OUTPUT,
            Reweighted(rows="moe.experts", way="exchanged", num_wrong=8, num_rows=8),
            module="moe",
        ),
        "moe sums the rows that moe.experts returns by the weights of other copies of the same tokens "
        "(inputs match)",
        "moe",
    ),
    (
        explain(
            Cause.FORWARD,
            OUTPUT,
            Reweighted(rows="moe.experts", way="of-others", num_wrong=7, num_rows=8),
            module="moe",
        ),
        "moe sums rows of other tokens, or none, in the place of 7 of the 8 rows that moe.experts returns "
        "(inputs match)",
        "moe",
    ),
    (
        explain(
            Cause.FORWARD,
            OUTPUT,
            Reweighted(rows="moe.experts", way="other", num_wrong=8, num_rows=8),
            module="moe",
        ),
        "moe sums the rows that moe.experts returns by other weights than one device (inputs match)",
        "moe",
    ),
    (
        explain(
            Cause.METRIC,
            Quantity.LOSS,
            Varied(
                formula="cross-entropy",
                variants=(
                    (
                        Change(part="denominator", way="first-part", number=2.0),
                        Change(part="logits-through", way="capped", number=30.0),
                    ),
                    (Change(part="added", way="subtracted", number=0.5, name="entropy"),),
                ),
                ranks=(1,),
                tokens=(6, 16),
            ),
            tensors=("lm",),
        ),
        "either the lm loss is the cross entropy with a softmax over the first of 2 parts of the vocabulary, and "
        "with its logits capped at 30 by a tanh, or it is the cross entropy with 0.5 times the entropy of the "
        "softmax subtracted on rank 1 alone at 6 of 16 tokens alone: the outputs are equal here",
        "lm loss",
    ),
    (
        explain(
            Cause.FORWARD,
            Quantity.LOSS,
            Varied(
                formula="cross-entropy",
                variants=((Change(part="gradient-of", way="centred", name="logits"),),),
            ),
            tensors=("lm",),
        ),
        "the lm loss is the cross entropy with the gradient that comes through the logits less its mean over its "
        "width",
        "lm loss",
    ),
]
