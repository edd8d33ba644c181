"""Sentences on causes and places: one for each operation on each quantity that it is found on."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from moeverify.report.words.cause import describe_explanation
from moeverify.report.words.place import describe_place
from moeverify.results.cause import Cause
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.factor import Factor, Product
from moeverify.results.operation import (
    Altered,
    Miscounted,
    Moved,
    Offset,
    Operation,
    OwnValues,
    RepeatedShard,
    Replaced,
    Rounded,
    Scaled,
    Shifted,
    Stepped,
    Unclipped,
    Unmoved,
    Unreduced,
    Zeroed,
)
from moeverify.results.part import WHOLE, Contribution, Group, Part, Tokens

EP, EFSDP, TP = (Product(times=(name,)) for name in ("ep", "efsdp", "tp"))
ROWS = Product(over=("rows of the batch",))
EXPERTS = {"tensors": tuple(f"layers.{n}.moe.experts.up" for n in range(12)), "family": "expert"}
DP_0, DP_2 = (Part(tokens=Tokens(data_rank=rank)) for rank in (0, 2))


REPLICATED = Part(group=Group(tensors=("a", "b"), axis="tp", placement="replicated"))


def explain(cause: Cause, quantity: Quantity, operation: Any, **subject: Any) -> Explanation:
    content = {"tensors": ("w",), **subject} if "module" not in subject else subject
    return Explanation(cause=cause, subject=Subject(quantity=quantity, **content), operation=operation)


def scale(value: float, *equals: Product, part: Part = WHOLE, power: int = 1) -> Contribution:
    return Contribution(part=part, factor=Factor(value=value, power=power, equals=equals))


def scaled(*contributions: Contribution, **fields: Any) -> Scaled:
    return Scaled(contributions=contributions, **fields)


GRADIENT, OUTPUT, BACK = Quantity.GRADIENT, Quantity.OUTPUT, Quantity.MODULE_GRADIENT

SENTENCES = [
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
        explain(Cause.STALE, GRADIENT, scaled(scale(1.0, part=Part(added="weight")))),
        "the weight was added to the gradient: the buffer was not set to zero",
        "the weight",
    ),
    (
        explain(Cause.STATE, Quantity.OPTIMIZER_STATE, Stepped(num_steps=1)),
        "the optimizer state counts 1 step too many",
        "optimizer step",
    ),
    (
        explain(Cause.FORWARD, Quantity.LOSS, Offset(value=0.693147, products=(TP,)), tensors=("lm",)),
        "the lm loss is off by 0.693147 = log(tp)",
        "lm loss, axis tp",
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
        "the gradients match, and the gradient norm is 1.41421x too large; squared: 2 = tp",
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
    (
        explain(
            Cause.PADDING,
            GRADIENT,
            scaled(
                scale(0.0, part=Part(term="balance")),
                scale(1.0, part=Part(term="balance", tokens=Tokens(padding=True))),
                scale(1.0, part=Part(term="z", tokens=Tokens(padding=True))),
            ),
        ),
        "padding tokens count in the balance and the z loss",
        "balance loss; z loss",
    ),
    # a reduction that is missing
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
    # nothing arrives
    (
        explain(Cause.DETACHED, GRADIENT, Zeroed()),
        "the gradient is exactly zero: the parameter is not reached",
        "",
    ),
    (
        explain(Cause.DETACHED, GRADIENT, Zeroed(absent=True), **EXPERTS),
        "12 expert gradients are absent: the parameters are detached from the loss",
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
    # other places
    (
        explain(
            Cause.PERMUTATION,
            GRADIENT,
            Moved(unit="slice", dim=0, moves=((1, 2), (2, 1)), num_moves=2),
        ),
        "the gradient has the right values, permuted along dim 0: 1 holds 2, 2 holds 1",
        "dim 0",
    ),
    (
        explain(
            Cause.DUPLICATE,
            Quantity.INITIAL_VALUE,
            Moved(unit="slice", dim=1, moves=tuple((n + 8, n) for n in range(6)), num_moves=8, copies=True),
            tensors=("a", "b"),
        ),
        "the initial values of 2 tensors have slices along dim 1 that are copies of others: 8 holds 0, 9 holds 1, "
        "10 holds 2, 11 holds 3, and 4 more",
        "dim 1",
    ),
    (
        explain(Cause.PERMUTATION, OUTPUT, Moved(unit="token", num_moves=112), module="layers.1.moe"),
        "112 tokens of the output of layers.1.moe hold the values of other tokens",
        "layers.1.moe",
    ),
    (
        explain(Cause.PERMUTATION, GRADIENT, Moved(unit="element")),
        "the gradient has exactly the expected values, in another order",
        "",
    ),
    (
        explain(Cause.PERMUTATION, Quantity.LOADED, Shifted(offset=32, rank=0)),
        "the loaded tensor has the right values in wrong places: read 32 elements too far along",
        "rank 0",
    ),
    (
        explain(Cause.PERMUTATION, Quantity.LOADED, Shifted(offset=-3, rank=1)),
        "the loaded tensor has the right values in wrong places: read 3 elements too early",
        "rank 1",
    ),
    # other values
    (
        explain(Cause.STALE, GRADIENT, Replaced(by="step-before")),
        "the gradient has the values of the step before: nothing new was accumulated",
        "",
    ),
    (
        explain(Cause.STATE, Quantity.LOADED, Replaced(by="step-before")),
        "the loaded tensor has the values of the step before the one that was saved",
        "",
    ),
    (
        explain(Cause.STALE, Quantity.BUFFER, Replaced(by="initial-value")),
        "the buffer has the values from before the first step",
        "",
    ),
    (
        explain(
            Cause.NOT_LOADED,
            Quantity.LOADED,
            Replaced(by="value-before-load", ranks=(0, 1)),
            tensors=("a", "b"),
        ),
        "2 loaded tensors were not loaded on ranks 0, 1, and have the values from before the load",
        "ranks 0, 1",
    ),
    (
        explain(Cause.DUPLICATE, Quantity.LOADED, Replaced(by="tensor", tensor="rng/0")),
        "the loaded tensor is a copy of rng/0",
        "rng/0",
    ),
    (
        explain(Cause.PERMUTATION, Quantity.LOADED, Replaced(by="tensor", tensor="up", exchanged=True)),
        "the loaded tensor has the values of up, which was loaded wrong too",
        "up",
    ),
    (
        explain(Cause.STALE, OUTPUT, Replaced(by="weights-of-step-before"), module="layers.1.norm"),
        "layers.1.norm computes with the weights of the step before: they were not refreshed",
        "layers.1.norm",
    ),
    (
        explain(Cause.STALE, Quantity.UPDATE, Unmoved()),
        "the update is zero although the gradient matches",
        "optimizer step",
    ),
    (
        explain(Cause.STALE, Quantity.BUFFER, Unmoved()),
        "the buffer did not change in this step although the routing says it should",
        "",
    ),
    (
        explain(Cause.NORM, Quantity.UPDATE, Unclipped(coefficient=0.126881), tensors=tuple("abc")),
        "the gradient norm matches, and nothing was clipped by it: 3 updates are 1/0.126881x the expected value",
        "clip",
    ),
    # rounding
    (
        explain(
            Cause.ROUNDING, GRADIENT, Rounded(dtype="bfloat16", is_representable=True), tensors=("a", "b")
        ),
        "2 gradients hold only values that bfloat16 can represent, and the golden does not",
        "",
    ),
    (
        explain(
            Cause.ROUNDING,
            GRADIENT,
            Rounded(dtype="bfloat16", is_representable=False),
            tensors=("a",),
            module="layers.2",
        ),
        "the gradient is off by about the rounding of bfloat16, in no direction, first in layers.2",
        "layers.2",
    ),
    (
        explain(Cause.ROUNDING, OUTPUT, Rounded(dtype="float32", is_representable=False), module="layers.2"),
        "the output of layers.2 is off by about the rounding of float32, in no direction",
        "layers.2",
    ),
    # counts and ranks
    (
        explain(Cause.PADDING, Quantity.ROUTING_COUNT, Miscounted(expected=276, actual=384, rank=0)),
        "rank 0 counts 384 choices of experts where 276 are expected: padding tokens count too",
        "",
    ),
    (
        explain(Cause.STATE, Quantity.ROUTING_COUNT, Miscounted(expected=276, actual=222, rank=1)),
        "rank 1 counts 222 choices of experts where 276 are expected",
        "",
    ),
    (
        explain(
            Cause.STATE,
            Quantity.ROUTING_COUNT,
            Miscounted(expected=276, actual=222, rank=1),
            tensors=("a", "b"),
        ),
        "rank 1 counts 222 choices of experts of each of 2 routers where 276 are expected",
        "",
    ),
    (
        explain(
            Cause.METRIC,
            Quantity.ROUTING_COUNT,
            scaled(scale(2.0)),
            tensors=("a", "b"),
            family="router",
        ),
        "only a reported number is wrong: the routing counts of 2 router tensors are 2x too large; the choice of "
        "experts matches",
        "",
    ),
    (
        explain(Cause.PERMUTATION, Quantity.LOADED, Shifted(offset=1, rank=0), **EXPERTS),
        "12 loaded expert tensors have the right values in wrong places: read 1 elements too far along",
        "rank 0",
    ),
    (
        explain(Cause.DUPLICATE, Quantity.INITIAL_VALUE, RepeatedShard(ranks=(0, 1))),
        "ranks 0 and 1 hold the same values in parts that should differ",
        "ranks 0, 1",
    ),
    (
        explain(Cause.REPLICAS, Quantity.INITIAL_VALUE, OwnValues(ranks=(1,))),
        "rank 1 started from values that the seed and the name do not give",
        "rank 1",
    ),
    (
        explain(Cause.REPLICAS, Quantity.BUFFER, OwnValues(ranks=(0, 1), axes=("tp",))),
        "ranks 0, 1, replicas over tp, should hold the same values and do not",
        "replicas over tp",
    ),
    # nothing is known but the place
    (
        explain(Cause.FORWARD, OUTPUT, Altered(), module="layers.0.moe.router"),
        "first divergence: layers.0.moe.router (inputs match, output does not)",
        "layers.0.moe.router",
    ),
    (
        explain(Cause.BACKWARD, BACK, Altered(), module=""),
        "first divergence in backward: the model (its output gradient matches, what it passes back does not)",
        "the model",
    ),
    (
        explain(Cause.STATE, OUTPUT, Altered(first_micro_batch=1), module="layers.1.moe.router"),
        "layers.1.moe.router matches in the first micro-batch and diverges from micro-batch 1 on: something that "
        "changes once a step changed between them",
        "layers.1.moe.router",
    ),
    (
        explain(Cause.ROUTING, OUTPUT, Altered(), module="layers.0.moe.router"),
        "layers.0.moe.router chooses other experts (inputs match)",
        "layers.0.moe.router",
    ),
    (
        explain(Cause.ROUTING, Quantity.EXPERT_CHOICE, Altered(), tensors=("layers.0.moe.router",)),
        "layers.0.moe.router chooses other experts (inputs match)",
        "",
    ),
    (
        explain(Cause.FORWARD, Quantity.ROUTING_WEIGHT, Altered(), tensors=("layers.0.moe.router",)),
        "layers.0.moe.router weights its choice differently (inputs match)",
        "",
    ),
    (
        explain(Cause.FORWARD, Quantity.LOSS, Altered(), tensors=("balance", "z")),
        "the balance and z loss is computed differently (routing and module outputs match)",
        "balance and z loss",
    ),
    (
        explain(Cause.METRIC, Quantity.LOSS, Altered(), tensors=("lm",)),
        "only a reported number is wrong: the lm loss is no multiple of the expected value; the gradients match",
        "lm loss",
    ),
    (
        explain(Cause.STATE, Quantity.BUFFER, Altered()),
        "the buffer changed differently from what the routing of this step says",
        "",
    ),
    (
        explain(Cause.STATE, Quantity.LOADED, Altered()),
        "the loaded tensor has other values than were saved, and none that are known",
        "",
    ),
    (
        explain(Cause.NONDETERMINISM, Quantity.UPDATE, Altered()),
        "two runs of the same layout differ: something in it is not deterministic",
        "optimizer step",
    ),
]


@pytest.mark.parametrize(("explanation", "cause", "where"), SENTENCES)
def test_a_cause_and_its_place_are_each_one_sentence(
    explanation: Explanation, cause: str, where: str
) -> None:
    assert (describe_explanation(explanation), describe_place(explanation)) == (cause, where)


def test_every_operation_has_words() -> None:
    union, _ = get_args(Operation)
    assert {type(explanation.operation) for explanation, *_ in SENTENCES} == set(get_args(union))
