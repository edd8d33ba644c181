"""Explanations with their sentences: sums with other parts or factors, reductions, and missing values."""

from __future__ import annotations

from explanations import (
    BACK,
    DP_0,
    DP_2,
    EFSDP,
    EP,
    EXPERTS,
    GRADIENT,
    OUTPUT,
    REPLICATED,
    ROWS,
    TP,
    explain,
    scale,
    scaled,
)

from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.factor import Factor, Product
from moeverify.results.operation import (
    Carried,
    Stepped,
    Unreduced,
    Zeroed,
)
from moeverify.results.part import Block, Part

FACTORS = [
    # parts of sums, added values, counters
    (
        explain(
            Cause.NORM, Quantity.GRADIENT_NORM, scaled(scale(2.0, TP, part=REPLICATED)), tensors=("total",)
        ),
        "the gradients match, and the gradient norm counts the squares of the 2 parameters replicated over tp "
        "2 times; 2 = tp",
        "gradient norm, the 2 parameters replicated over tp, axis tp",
    ),
    (
        explain(Cause.STATE, Quantity.OPTIMIZER_STATE, Stepped(num_steps=1)),
        "the optimizer state counts 1 step too many",
        "optimizer step",
    ),
    (
        explain(
            Cause.CARRIED_STATE,
            Quantity.OPTIMIZER_STATE,
            Carried(factor=Factor(value=0.0), block=Block(dim=0, indices=(1, 4), unit="expert")),
            **EXPERTS,
        ),
        "12 expert optimizer states in experts 1, 4 of dim 0 began the step at zero: the state of the previous "
        "step was lost",
        "optimizer step",
    ),
    (
        explain(
            Cause.CARRIED_STATE,
            Quantity.OPTIMIZER_STATE,
            Carried(factor=Factor(value=2.0, equals=(EP,)), ranks=(1,)),
        ),
        "the optimizer state on rank 1 began the step with 2x the state of the previous step; 2 = ep",
        "optimizer step, axis ep",
    ),
    (
        explain(
            Cause.CARRIED_STATE,
            Quantity.OPTIMIZER_STATE,
            Carried(moves=((1, 4), (4, 1)), block=Block(dim=0, indices=(1, 4), unit="expert")),
        ),
        "the optimizer state in experts 1, 4 of dim 0 began the step with the state of other slices along dim 0: 1 "
        "with that of 4, 4 with that of 1",
        "optimizer step",
    ),
    # a factor of everything
    (
        explain(Cause.SCALE, GRADIENT, scaled(scale(2.0, EP, EFSDP)), **EXPERTS),
        "12 expert gradients are 2x too large; 2 = ep = efsdp (ambiguous in this layout)",
        "axis ep, efsdp",
    ),
    (
        explain(Cause.SCALE, GRADIENT, scaled(scale(0.5, Product(over=("tp",))))),
        "the gradient is 0.5x the expected value; 0.5 = 1/tp",
        "axis tp",
    ),
    (
        explain(Cause.SCALE, GRADIENT, scaled(scale(0.125, Product(over=("micro-batches", "pp")), ROWS))),
        "the gradient is 0.125x the expected value; 0.125 = 1/(micro-batches * pp) = 1/rows of the batch (ambiguous "
        "in this layout)",
        "axis pp, number of micro-batches, number of rows of the batch",
    ),
    (explain(Cause.SCALE, GRADIENT, scaled(scale(92.0))), "the gradient is 92x too large", ""),
    (
        explain(Cause.SCALE, OUTPUT, scaled(scale(2.0, TP)), module="layers.0.moe"),
        "the output of layers.0.moe is 2x too large; 2 = tp",
        "layers.0.moe, axis tp",
    ),
    (
        explain(Cause.SCALE, BACK, scaled(scale(0.0)), module="layers.0.moe"),
        "the gradient that layers.0.moe passes back is zero",
        "layers.0.moe",
    ),
    (
        explain(Cause.SCALE, Quantity.UPDATE, scaled(scale(0.73)), tensors=("a", "b")),
        "2 updates are 0.73x the expected value; their gradients match",
        "optimizer step",
    ),
    (
        explain(Cause.METRIC, Quantity.LOSS, scaled(scale(2.0, TP)), tensors=("lm",)),
        "only a reported number is wrong: the lm loss is 2x too large; 2 = tp; the gradients match",
        "lm loss, axis tp",
    ),
    (
        explain(Cause.METRIC, Quantity.ROUTING_COUNT, scaled(scale(2.0))),
        "only a reported number is wrong: the routing counts are 2x too large; the choice of experts matches",
        "",
    ),
    (
        explain(Cause.NORM, Quantity.GRADIENT_NORM, scaled(scale(2.0**0.5, TP, power=2)), tensors=("total",)),
        "the gradients match, and the gradient norm counts all squares 2 times, so the gradient "
        "norm is 1.41421x too large; 2 = tp",
        "gradient norm, axis tp",
    ),
    # factors of parts
    (
        explain(
            Cause.TERM_SCALE,
            GRADIENT,
            scaled(scale(0.0, part=Part(term="balance")), scale(2.0, EP, part=Part(term="z"))),
            tensors=("a", "b"),
        ),
        "in 2 gradients, the part of the balance loss is missing; the part of the z loss is 2x too large; 2 = ep",
        "balance loss; z loss, axis ep",
    ),
    (
        explain(Cause.SHARE_WEIGHTS, GRADIENT, scaled(scale(0.0, part=DP_2))),
        "the share of dp 2 is missing",
        "dp 2",
    ),
    (
        explain(Cause.SHARE_WEIGHTS, GRADIENT, scaled(scale(1.25, part=DP_0), scale(0.5, part=DP_2))),
        "data shards are weighted incorrectly: dp 0 by 1.25; dp 2 by 0.5",
        "dp 0; dp 2",
    ),
    (
        explain(Cause.SHARE_WEIGHTS, GRADIENT, scaled(scale(1.25, part=DP_0), local_means=4)),
        "mean of means: each of the 4 data shards is divided by its own number of valid tokens",
        "denominators",
    ),
    # a missing reduction
    (
        explain(
            Cause.MISSING_REDUCTION,
            GRADIENT,
            Unreduced(axes=(TP,), num_replicas=2, factor=Factor(value=1.0 + 1e-9)),
            tensors=("a", "b", "c"),
        ),
        "3 gradients are not reduced over tp: the 2 replicas sum to the expected value",
        "axis tp",
    ),
    (
        explain(
            Cause.MISSING_REDUCTION,
            BACK,
            Unreduced(axes=(TP, EP), num_replicas=2, factor=Factor(value=2.0, equals=(TP,))),
            module="layers.2.moe",
        ),
        "the gradient that layers.2.moe passes back is not reduced over tp or ep (ambiguous in this layout): the 2 "
        "replicas sum to 2x the expected value",
        "layers.2.moe, axis tp, ep",
    ),
    (
        explain(
            Cause.MISSING_REDUCTION, GRADIENT, Unreduced(axes=(), num_replicas=2, factor=Factor(value=1.0))
        ),
        "the gradient is not reduced over an unknown axis: the 2 replicas sum to the expected value",
        "",
    ),
    # 16-bit estimates, of which a number of the run is none
    (
        explain(
            Cause.TERM_SCALE,
            GRADIENT,
            scaled(
                scale(0.0, part=Part(term="lm")),
                scale(0.0294785, part=Part(term="balance")),
                scale(2.0, TP, part=Part(term="z")),
            ),
        ).model_copy(update={"is_estimate": True}),
        "in the gradient, the part of the lm loss is missing; the part of the balance loss is about 0.029x the "
        "expected value; the part of the z loss is 2x too large; 2 = tp",
        "lm loss; balance loss; z loss, axis tp",
    ),
    # nothing arrives
    (
        explain(Cause.DETACHED, GRADIENT, Zeroed()),
        "the gradient is exactly zero: the parameter is not reached",
        "",
    ),
    (
        explain(Cause.DETACHED, GRADIENT, Zeroed(absent=True), **EXPERTS),
        "12 expert gradients are absent: the parameters are detached from the loss, or nothing wrote there",
        "",
    ),
    (
        explain(Cause.DETACHED, Quantity.INITIAL_VALUE, Zeroed()),
        "the initial values are all zero: nothing was filled in",
        "",
    ),
    (
        explain(
            Cause.MISSING,
            Quantity.INITIAL_VALUE,
            Zeroed(absent=True),
            tensors=("layers.2.norm.weight", "layers.2.mlp.up_proj.weight"),
        ),
        "the initial values of 2 tensors are on no rank: layers.2 is missing under this layout",
        "",
    ),
    (
        explain(Cause.NOT_LOADED, Quantity.LOADED, Zeroed(absent=True)),
        "the loaded tensor is on no rank: it was dropped",
        "",
    ),
    (explain(Cause.DETACHED, Quantity.LOADED, Zeroed()), "the loaded tensor is zero", ""),
]
