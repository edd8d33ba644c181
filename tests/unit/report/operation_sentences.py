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
from moeverify.results.norm_powers import NormOfPowers
from moeverify.results.operation import (
    Misplaced,
    Misreduced,
    MovedOtherwise,
    NormOfNorms,
    NormOfOrder,
    NormOfPartials,
    NormOfSlices,
    Reclipped,
    Redefined,
    Reweighted,
    Scaled,
    Varied,
)
from moeverify.results.own_module import Mistake, Mistaken
from moeverify.results.part import WHOLE, Contribution, Group
from moeverify.results.token_weights import Averaging, Reaveraged, TokenCount, TokenGroups, TokenSet

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
            Cause.NORM,
            Quantity.GRADIENT_NORM,
            NormOfNorms(
                combination="sum",
                groups=(
                    Group(tensors=("a", "b"), axis="ep", placement="replicated"),
                    Group(tensors=("c",), axis="ep", placement="sharded"),
                ),
            ),
        ),
        "the gradients match, and the gradient norm is the sum of the norms of the 2 parameters replicated over ep "
        "and of the 1 parameter sharded over ep, not the root of their squares",
        "gradient norm",
    ),
    (
        explain(
            Cause.NORM,
            Quantity.GRADIENT_NORM,
            NormOfPartials(combination="norms", tensors=("a", "b"), axes=(TP,)),
        ),
        "the gradients match, and the gradient norm counts 2 gradients as the sum of the norms of the ranks' parts, "
        "before they are summed over tp",
        "gradient norm",
    ),
    (
        explain(Cause.NORM, Quantity.GRADIENT_NORM, NormOfPartials(combination="own", tensors=("a.weight",))),
        "the gradients match, and the gradient norm counts the gradient of a.weight by each rank's own part alone, "
        "before it is summed over ranks",
        "gradient norm",
    ),
    (
        explain(
            Cause.NORM,
            Quantity.CLIP_COEFFICIENT,
            Reclipped(way="guard", factor=Factor(value=2.0, equals=(TP,))),
        ),
        "the gradient norm matches, and the clip coefficient adds the small number that guards its division 2 times "
        "(2 = tp)",
        "gradient norm",
    ),
    (
        explain(
            Cause.NORM,
            Quantity.GRADIENT_NORM,
            Scaled(contributions=(Contribution(part=WHOLE, factor=Factor(value=1023.9)),), loss_scale=10),
        ),
        "the gradients match, and the gradient norm is 1024 times the right one, as of gradients that still have a "
        "scale of the loss of 1024",
        "gradient norm",
    ),
    (
        explain(Cause.NORM, Quantity.CLIP_COEFFICIENT, Reclipped(way="guard", factor=Factor(value=0.0))),
        "the gradient norm matches, and the clip coefficient lacks the small number that guards its division",
        "gradient norm",
    ),
    (
        explain(Cause.NORM, Quantity.CLIP_COEFFICIENT, Reclipped(way="unbounded")),
        "the gradient norm matches, and the clip coefficient is not bounded by 1: small gradients are made larger",
        "gradient norm",
    ),
    (
        explain(
            Cause.FORWARD,
            Quantity.LOSS,
            Redefined(
                term="balance",
                variants=(
                    (
                        Change(part="probabilities", way="softmax-again"),
                        Change(part="counts", way="without-groups"),
                    ),
                ),
            ),
            tensors=("balance",),
        ),
        "the balance loss is made of a softmax of the probabilities in place of these and of the counts of a choice "
        "without groups",
        "balance loss",
    ),
    (
        explain(
            Cause.FORWARD,
            Quantity.LOSS,
            Redefined(
                term="balance",
                variants=((Change(part="counts", way="first"),), (Change(part="counts", way="padded"),)),
            ),
            tensors=("balance",),
        ),
        "the balance loss is made either of the counts of each token's first choice alone, or of counts in which "
        "tokens of padding take part: the gradients are equal here",
        "balance loss",
    ),
    (
        explain(
            Cause.NORM,
            Quantity.GRADIENT_NORM,
            NormOfPowers(part="parameter", number="norm", power=4.0, root=2.0),
        ),
        "the gradients match, and the gradient norm is the root of the sum of the fourth powers of the norms "
        "of all parameters, and not the root of the sum of all squares",
        "gradient norm",
    ),
    (
        explain(
            Cause.NORM,
            Quantity.GRADIENT_NORM,
            NormOfPowers(part="layer", number="mean-square", power=1.0, root=1.0, is_mean=True),
        ),
        "the gradients match, and the gradient norm is the mean of the roots of the mean squares of each layer "
        "and of all else, and not the root of the sum of all squares",
        "gradient norm",
    ),
    (
        explain(
            Cause.NORM,
            Quantity.GRADIENT_NORM,
            NormOfPowers(part="module", number="absolute", power=1.0, root=1.0, is_largest=True),
        ),
        "the gradients match, and the gradient norm is the largest of the sums of absolute gradients of all "
        "modules, and not the root of the sum of all squares",
        "gradient norm",
    ),
    (
        explain(
            Cause.NORM, Quantity.GRADIENT_NORM, NormOfPowers(part="all", number="norm", power=1.0, root=0.25)
        ),
        "the gradients match, and the gradient norm is the fourth power of the right one, and not the root "
        "of the sum of all squares",
        "gradient norm",
    ),
    (
        explain(
            Cause.NORM,
            Quantity.GRADIENT_NORM,
            NormOfPowers(part="all", number="mean-square", power=1.0, root=0.5),
        ),
        "the gradients match, and the gradient norm is the square of the root of the mean square of all "
        "elements, and not the root of the sum of all squares",
        "gradient norm",
    ),
    (
        explain(
            Cause.NORM,
            Quantity.GRADIENT_NORM,
            NormOfPowers(
                part="all",
                number="norm",
                power=1.0,
                root=1.0,
                factor=Factor(value=2.0, equals=(Product(times=("dp_shard",)),)),
            ),
        ),
        "the gradients match, and the gradient norm is 2 times the right one; 2 = dp_shard",
        "gradient norm, axis dp_shard",
    ),
    (
        explain(Cause.NORM, Quantity.GRADIENT_NORM, NormOfOrder(order="largest")),
        "the gradients match, and the gradient norm is the largest absolute gradient, a norm of order infinity and "
        "not 2",
        "gradient norm",
    ),
    (
        explain(Cause.NORM, Quantity.GRADIENT_NORM, NormOfSlices(combination="own", axes=(TP,))),
        "the gradients match, and the squares are not summed over tp: each rank's gradient norm counts only those of "
        "the ranks at its own coordinate",
        "gradient norm, axis tp",
    ),
    (
        explain(
            Cause.NORM,
            Quantity.GRADIENT_NORM,
            NormOfSlices(combination="mean", axes=(TP,), group=Group(tensors=("a", "b"), family="expert")),
        ),
        "the gradients match, and the squares of the 2 expert parameters are not summed over tp: the gradient norm "
        "is the mean of the norms at each coordinate",
        "gradient norm, axis tp",
    ),
    (
        explain(
            Cause.NORM,
            Quantity.GRADIENT_NORM,
            NormOfSlices(
                combination="sum",
                axes=(TP,),
                group=Group(tensors=("a", "b"), family="expert"),
                is_apart=True,
            ),
        ),
        "the gradients match, and the squares of the 2 expert parameters are not summed over tp: their part of the "
        "gradient norm is the square of the sum of their norms at each coordinate",
        "gradient norm, axis tp",
    ),
    (
        explain(
            Cause.STATE,
            Quantity.BUFFER,
            MovedOtherwise(rule=("reversed",)),
            tensors=("router.selection_bias",),
        ),
        "the selection bias moves in the wrong direction: up where an expert has more tokens than the mean",
        "",
    ),
    (
        explain(Cause.NORM, Quantity.GRADIENT_NORM, NormOfNorms(combination="max")),
        "the gradients match, and the gradient norm is the largest of the norms of all parameters, not the root of "
        "their squares",
        "gradient norm",
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
