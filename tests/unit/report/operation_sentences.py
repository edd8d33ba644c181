"""Explanations with their sentences: sums made in another way, parts of another shape, and variants of a formula."""

from __future__ import annotations

from explanations import (
    BACK,
    GRADIENT,
    OUTPUT,
    TP,
    explain,
)

from moeverify.results.cause import Cause
from moeverify.results.change import Change
from moeverify.results.explanation import Quantity
from moeverify.results.factor import Factor, Product
from moeverify.results.known_sum import KnownSum, Term
from moeverify.results.operation import (
    Misplaced,
    Misreduced,
    Reweighted,
    Varied,
)
from moeverify.results.own_module import Mistake, Mistaken

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
            Cause.FORWARD,
            Quantity.OUTPUT,
            KnownSum(sums=((Term(tensor="output:a.norm", factor=1.0), Term(tensor="", factor=-0.5)),)),
            module="a",
        ),
        "a puts out the output of a.norm - 0.5 times what it should be",
        "a",
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
            Cause.FORWARD,
            OUTPUT,
            Mistaken(
                module="layers.0.attn",
                mistakes=(
                    Mistake(part="attribute", name="scaling", way="fitted", before="0.5", number=0.25),
                    Mistake(part="input", name="mask", way="reach", number=1.0),
                    Mistake(part="step", name="cat", way="moved:2", number=-1.0, line="model.py:12"),
                    Mistake(part="child", name="layers.0.attn.norm", way="left-out"),
                ),
                ranks=(1,),
            ),
            module="layers.0.attn",
        ),
        "the output of layers.0.attn is what layers.0.attn gives with scaling = 0.25 in place of 0.5, or with its "
        "mask showing each query 1 more key further back, or with the result of cat at model.py:12 moved by -1 along "
        "dim 2, or with another mistake that gives the same on rank 1 alone",
        "layers.0.attn",
    ),
    (
        explain(
            Cause.BACKWARD,
            Quantity.MODULE_GRADIENT,
            Mistaken(
                module="layers",
                mistakes=(
                    Mistake(
                        part="attribute",
                        name="top_k",
                        way="value",
                        module="layers.gate",
                        before="2",
                        after="1",
                    ),
                ),
            ),
            module="layers.experts",
        ),
        "the gradient that layers.experts passes back is what layers passes back with layers.gate.top_k = 1 in place "
        "of 2",
        "layers.experts",
    ),
    (
        explain(
            Cause.FORWARD,
            OUTPUT,
            Varied(formula="attention", variants=((Change(part="mask", way="none"),),), ranks=(1,)),
            module="layers.0.attention",
        ),
        "layers.0.attention attends without a causal mask: every query sees every key on rank 1 alone",
        "layers.0.attention",
    ),
    *(
        (
            explain(
                Cause.FORWARD,
                OUTPUT,
                Varied(formula="attention", variants=((change,),)),
                module="layers.0.attention",
            ),
            f"layers.0.attention attends with {text}",
            "layers.0.attention",
        )
        for change, text in (
            (
                Change(part="scale", way="hidden-share"),
                "scores divided by the root of the hidden width over the number of heads, and not of the width of a "
                "head",
            ),
            (
                Change(part="scale", way="unrotated-width"),
                "scores divided by the root of the width that is not rotated",
            ),
            (
                Change(part="merge", way="base-2"),
                "ranks' chunks merged by 2 to the power of their logsumexp in place of e",
            ),
            (
                Change(part="merge", way="earlier-whole", name="in-order"),
                "ranks' chunks in the order of ranks merged without rescaling what is summed up before when a "
                "further one comes",
            ),
            (
                Change(part="merge", way="largest", name="4"),
                "blocks of 4 keys merged by their largest score in place of their logsumexp",
            ),
            (
                Change(part="merge", way="others-times", number=2.0),
                "the softmax of other ranks' chunks counted 2 times as often as that of the rank's own one",
            ),
            (
                Change(part="softmax", way="ring-numerator", name="4"),
                "blocks of 4 keys merged without rescaling their values to the largest score of all",
            ),
        )
    ),
    (
        explain(
            Cause.FORWARD,
            OUTPUT,
            Mistaken(
                module="layers.0.attn",
                mistakes=(
                    Mistake(
                        part="step", name="softmax", way="merged:merge/opposite", after="", line="model.py:7"
                    ),
                    Mistake(part="step", name="softmax", way="merged:reach/own", line="model.py:7"),
                    Mistake(
                        part="step",
                        name="softmax",
                        way="merged:merge/numerator-first",
                        after="8",
                        line="model.py:7",
                    ),
                ),
            ),
            module="layers.0.attn",
        ),
        "the output of layers.0.attn is what layers.0.attn gives with ranks' chunks merged by the negative of their "
        "logsumexp, in softmax at model.py:7, or with attention to the keys of the rank's own chunk alone, in "
        "softmax at model.py:7, or with the values of the rank's own chunk alone over the denominator of all, where "
        "chunks are blocks of 8 keys, in softmax at model.py:7",
        "layers.0.attn",
    ),
    (
        explain(
            Cause.FORWARD,
            OUTPUT,
            Varied(
                formula="routed-experts",
                variants=(
                    (
                        Change(part="weights", way="none"),
                        Change(part="experts", way="of-rank", number=1.0),
                    ),
                    (Change(part="input", way="of-module", name="input:layers.1.moe"),),
                ),
            ),
            module="layers.1.moe.dispatcher",
        ),
        "either layers.1.moe.dispatcher computes without combine weights, and with the experts of the rank 1 further "
        "over ep in the place of each, or it computes from the input of layers.1.moe in place of the right input: "
        "the outputs are equal here",
        "layers.1.moe.dispatcher",
    ),
    (
        explain(
            Cause.BACKWARD,
            BACK,
            Varied(
                formula="gradient:attention",
                variants=((Change(part="queries", way="without-rank", number=1.0),),),
                blocks=(2, 3),
            ),
            module="layers.0.attention",
        ),
        "layers.0.attention passes back the gradient of the attention without the queries of rank 1 over cp in heads "
        "2, 3 alone",
        "layers.0.attention",
    ),
    (
        explain(
            Cause.FORWARD,
            OUTPUT,
            Varied(
                formula="routed-experts",
                variants=(
                    (
                        Change(
                            part="down-bias",
                            way="times",
                            number=2.0,
                            factor=Factor(value=2.0, equals=(Product(times=("tp",)),)),
                            is_summed=True,
                        ),
                    ),
                ),
                tokens=(6, 16),
            ),
            module="layers.1.moe.dispatcher",
        ),
        "layers.1.moe.dispatcher computes with 2 times the down bias, once on each rank of tp before the sum at 6 of "
        "16 tokens alone",
        "layers.1.moe.dispatcher",
    ),
    (
        explain(
            Cause.FORWARD,
            OUTPUT,
            Varied(
                formula="linear-layer",
                variants=((Change(part="bias", way="times", number=1.37, factor=Factor(value=1.37)),),),
            ),
            module="layers.0.mlp.up_proj",
        ),
        "layers.0.mlp.up_proj computes with its bias added 1.37 times, which is no count of this layout",
        "layers.0.mlp.up_proj",
    ),
    (
        explain(
            Cause.FORWARD,
            OUTPUT,
            Varied(
                formula="branches",
                variants=(
                    (
                        Change(
                            part="term-1",
                            way="twice",
                            name="shared expert",
                            factor=Factor(
                                value=2.0, equals=(Product(times=("ep",)), Product(times=("top_k",)))
                            ),
                        ),
                    ),
                ),
            ),
            module="layers.1.moe",
        ),
        "layers.1.moe computes with the shared expert twice (2 is also ep or top_k)",
        "layers.1.moe",
    ),
    (
        explain(
            Cause.FORWARD,
            OUTPUT,
            Varied(
                formula="router",
                variants=((Change(part="route-scale", way="none"),),),
                factor=Factor(value=0.5, equals=(Product(over=("tp",)),)),
            ),
            module="layers.1.moe.router",
        ),
        "either layers.1.moe.router computes without the scale of the weights, or all that it puts out is 0.5x the "
        "expected value; 0.5 = 1/tp: the outputs are equal here",
        "layers.1.moe.router",
    ),
]
