"""Explanations with their sentences: values of other places, other values, rounding, counts, bare places."""

from __future__ import annotations

from explanations import (
    BACK,
    EXPERTS,
    GRADIENT,
    OUTPUT,
    explain,
    scale,
    scaled,
)

from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.factor import Factor
from moeverify.results.operation import (
    Altered,
    Miscounted,
    Moved,
    OwnValues,
    RepeatedShard,
    Replaced,
    Rounded,
    Scaled,
    Shifted,
    Unmoved,
    Zeroed,
)
from moeverify.results.part import WHOLE, Contribution

VALUES = [
    # other places
    (
        explain(Cause.ROUNDING, Quantity.LOADED, Rounded(dtype="bfloat16")),
        "the loaded tensor holds only values that bfloat16 can represent, and what was saved does not",
        "",
    ),
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
        explain(Cause.PERMUTATION, Quantity.LOADED, Shifted(offset=-3, rank=1), **EXPERTS),
        "12 loaded expert tensors have the right values in wrong places: read 3 elements too early",
        "rank 1",
    ),
    # other values
    (
        explain(Cause.BACKWARD, Quantity.MODULE_GRADIENT, Altered(), tensors=("lm",)),
        "first divergence in backward: the gradient that the lm loss passes back (no gradient was right before it)",
        "lm loss",
    ),
    (
        explain(Cause.STALE, GRADIENT, Replaced(by="step-before")),
        "the gradient has the values of the step before: nothing new was accumulated",
        "",
    ),
    (
        explain(Cause.STALE, Quantity.ROUTING_COUNT, Replaced(by="step-before")),
        "the routing counts have the values of the step before: nothing new was counted",
        "",
    ),
    (
        explain(Cause.STATE, Quantity.LOADED, Replaced(by="step-before")),
        "the loaded tensor has the values of the step before the one that was saved",
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
        explain(Cause.STALE, Quantity.UPDATE, Unmoved(ranks=(1,), unused=True)),
        "rank 1 holds a copy that nothing there uses: no gradient comes to it, the update is zero there and matches "
        "elsewhere",
        "optimizer step",
    ),
    (
        explain(Cause.STALE, Quantity.UPDATE, Unmoved(ranks=(2, 3), unused=True), tensors=("a", "b")),
        "ranks 2, 3 hold copies that nothing there uses: no gradient comes to them, 2 updates are zero there and "
        "match elsewhere",
        "optimizer step",
    ),
    (
        explain(Cause.STALE, Quantity.BUFFER, Unmoved()),
        "the buffer did not change in this step, unlike on one device",
        "",
    ),
    # rounding
    (
        explain(Cause.ROUNDING, GRADIENT, Rounded(dtype="bfloat16"), tensors=("a", "b")),
        "2 gradients hold only values that bfloat16 can represent, and the golden does not",
        "",
    ),
    (
        explain(
            Cause.ROUNDING,
            GRADIENT,
            Rounded(dtype="bfloat16"),
            tensors=("a",),
            module="layers.2",
        ),
        "the gradient holds only values that bfloat16 can represent, and the golden does not, first in layers.2",
        "layers.2",
    ),
    # counts and ranks
    (
        explain(Cause.STATE, Quantity.ROUTING_COUNT, Miscounted(expected=276, actual=222, rank=1)),
        "rank 1 counts 222 choices of experts where 276 are expected",
        "",
    ),
    (
        explain(
            Cause.PADDING,
            Quantity.ROUTING_COUNT,
            Miscounted(expected=276, actual=384, rank=1, counts_padding=True),
        ),
        "rank 1 counts 384 choices of experts where 276 are expected: those of padding, too",
        "",
    ),
    (
        explain(Cause.STATE, Quantity.ROUTING_COUNT, Miscounted(expected=276, actual=276, rank=1)),
        "rank 1 counts 276 choices, the expected number, but for other experts than expected",
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
        explain(Cause.STALE, Quantity.CLIP_COEFFICIENT, Replaced(by="step-before")),
        "the gradients match, and the clip coefficient is that of the step before",
        "gradient norm",
    ),
    (
        explain(Cause.DETACHED, BACK, Zeroed(), module="moe.dispatcher"),
        "the gradient that moe.dispatcher passes back is exactly zero: it is cut from the graph there",
        "moe.dispatcher",
    ),
    (
        explain(Cause.METRIC, Quantity.EXPERT_CHOICE, Altered(), tensors=("moe.router",)),
        "only the report of moe.router is wrong: the output of its block matches",
        "",
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
        explain(Cause.REPLICAS, Quantity.INITIAL_VALUE, OwnValues(ranks=(1,), source="weights")),
        "rank 1 started from other values than those of the folder of weights",
        "rank 1",
    ),
    (
        explain(Cause.REPLICAS, Quantity.INITIAL_VALUE, OwnValues(ranks=(1,), source="factory")),
        "rank 1 started from other values than those of the model that `recipe.model.factory` makes",
        "rank 1",
    ),
    (
        explain(Cause.REPLICAS, Quantity.INITIAL_VALUE, OwnValues(ranks=(2, 3), axes=("dp_replicate",))),
        "ranks 2, 3 started from values that the seed and the name do not give, other ones than their replicas over "
        "dp_replicate",
        "replicas over dp_replicate",
    ),
    (
        explain(Cause.REPLICAS, Quantity.BUFFER, OwnValues(ranks=(0, 1), axes=("tp",))),
        "ranks 0, 1, replicas over tp, should hold the same values and do not",
        "replicas over tp",
    ),
    # a module's formula with a changed part
    (
        explain(
            Cause.SCALE,
            OUTPUT,
            Scaled(contributions=(Contribution(part=WHOLE, factor=Factor(value=1.37)),)),
            module="layers.1.moe",
        ),
        "the output of layers.1.moe is 1.37x too large, which is no count of this layout",
        "layers.1.moe",
    ),
    # only the place is known
    (
        explain(Cause.FORWARD, OUTPUT, Altered(), module="layers.0.moe.router"),
        "first divergence: layers.0.moe.router (inputs match, output does not)",
        "layers.0.moe.router",
    ),
    (
        explain(Cause.FORWARD, OUTPUT, Altered(inputs_seen=False), module="embed"),
        "first divergence: embed (inputs are not known to match, output does not)",
        "embed",
    ),
    (
        explain(Cause.FORWARD, OUTPUT, Altered(is_no_number=True), module="layers.0.attention"),
        "first divergence: layers.0.attention (inputs match, output has values that are no numbers)",
        "layers.0.attention",
    ),
    (
        explain(Cause.BACKWARD, BACK, Altered(is_no_number=True), module="layers.0.attention"),
        "first divergence in backward: layers.0.attention (its output gradient matches, its input gradient has "
        "values that are no numbers)",
        "layers.0.attention",
    ),
    (
        explain(Cause.BACKWARD, BACK, Altered(), module=""),
        "first divergence in backward: the model (its output gradient matches, its input gradient does not)",
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
        "the buffer changed differently than on one device",
        "",
    ),
    (
        explain(Cause.STATE, Quantity.LOADED, Altered()),
        "the loaded tensor has neither the saved values nor those of another known tensor",
        "",
    ),
    (
        explain(Cause.NONDETERMINISM, Quantity.UPDATE, Altered()),
        "two runs of the same layout differ: something in it is not deterministic",
        "optimizer step",
    ),
]
