"""Explanations with their sentences: gradient norms, clips and other numbers that are made of all gradients."""

from __future__ import annotations

from explanations import TP, explain

from moeverify.results.cause import Cause
from moeverify.results.change import Change
from moeverify.results.explanation import Quantity
from moeverify.results.factor import Factor, Product
from moeverify.results.norm_powers import NormOfPowers
from moeverify.results.operation import (
    NormOfNorms,
    NormOfOrder,
    NormOfPartials,
    NormOfSlices,
    Reclipped,
    Redefined,
    Scaled,
)
from moeverify.results.part import WHOLE, Contribution, Group
from moeverify.results.upstream import OffUpstream

NORMS = [
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
        explain(Cause.NORM, Quantity.GRADIENT_NORM, NormOfNorms(combination="max")),
        "the gradients match, and the gradient norm is the largest of the norms of all parameters, not the root of "
        "their squares",
        "gradient norm",
    ),
    (
        explain(
            Cause.BACKWARD,
            Quantity.GRADIENT_NORM,
            OffUpstream(factor=Factor(value=0.9895114), limit=0.244, is_sure=True),
        ),
        "the gradient norm is 0.989511x the expected value, as the ranks' own gradients give: some of these are "
        "wrong by less than is seen of each",
        "gradient norm",
    ),
    (
        explain(
            Cause.BACKWARD,
            Quantity.UPDATE,
            OffUpstream(factor=Factor(value=0.9), limit=0.244),
            tensors=("a", "b"),
        ),
        "2 updates are 0.9x the expected value; it is not known whether the gradients match: in half of them errors "
        "below 24 % are not seen",
        "optimizer step",
    ),
]
