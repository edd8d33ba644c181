"""Explanations with their sentences: gradient norms, clips and other functions of all gradients."""

from __future__ import annotations

from explanations import TP, explain

from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.factor import Factor
from moeverify.results.operation import (
    NormOfSlices,
    Scaled,
)
from moeverify.results.part import WHOLE, Contribution, Group
from moeverify.results.upstream import OffUpstream

NORMS = [
    (
        explain(
            Cause.NORM,
            Quantity.GRADIENT_NORM,
            Scaled(contributions=(Contribution(part=WHOLE, factor=Factor(value=1023.9)),), loss_scale=10),
        ),
        "the gradients match, and the gradient norm is 1024 times the right one, as if the gradients still had the "
        "loss scale 1024",
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
