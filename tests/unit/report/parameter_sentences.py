"""Explanations with their sentences: gradients of parameters, terms of derivatives, products that ranks divide."""

from __future__ import annotations

from typing import Any

from explanations import BACK, GRADIENT, OUTPUT, explain

from moeverify.results.cause import Cause
from moeverify.results.change import Change
from moeverify.results.operation import Varied


def say(module: str, of: str, sentence: str, *changes: Change) -> tuple[Any, str, str]:
    operation = Varied(formula=f"parameter:{of}", variants=(changes,))
    explanation = explain(Cause.BACKWARD, GRADIENT, operation, tensors=(f"{module}.{of}",), module=module)
    return explanation, f"{module} makes the gradient of its {of} {sentence}", module


def say_derivative(sentence: str, change: Change) -> tuple[Any, str, str]:
    operation = Varied(formula="gradient:feed-forward-block", variants=((change,),))
    explanation = explain(Cause.BACKWARD, BACK, operation, module="layers.0.mlp")
    return (
        explanation,
        f"layers.0.mlp passes back the gradient of the feed forward block {sentence}",
        "layers.0.mlp",
    )


def say_shards(formula: str, module: str, sentence: str, change: Change) -> tuple[Any, str, str]:
    operation = Varied(formula=formula, variants=((change,),))
    quantity = BACK if formula.startswith("gradient:") else OUTPUT
    cause = Cause.BACKWARD if quantity is BACK else Cause.FORWARD
    return explain(cause, quantity, operation, module=module), f"{module} {sentence}", module


PARAMETERS = [
    say_shards(
        "gradient:attention",
        "layers.2.attention",
        "passes back the gradient of the attention with the slice of the rank that has a position in the place of "
        "each rank's own, of the gradient that comes back from its last layer",
        Change(part="slices-of-ranks", way="of-position", name="given"),
    ),
    say_shards(
        "gradient:input:layers.2.attention",
        "layers.2",
        "passes back the gradient of the input of layers.2.attention without each rank's own part in the sum over tp",
        Change(part="sum-over-ranks", way="not-own"),
    ),
    say_shards(
        "linear-layer",
        "layers.0.mlp.down_proj",
        "computes without the part of rank 1 of tp in the sum",
        Change(part="sum-over-ranks", way="without", number=1),
    ),
    say_shards(
        "linear-layer",
        "layers.0.attention.q_proj",
        "computes with the positions of the ranks of tp in reverse order",
        Change(part="slices-of-ranks", way="chunks-reversed", name="result"),
    ),
    say_derivative(
        "with -x*s in place of x*s*(1-s) in the derivative s + x*s*(1-s) of silu, where s is the sigmoid",
        Change(part="derivative", way="second-of-silu", number=-1.0, name="x*s"),
    ),
    say_derivative(
        "with 0 in place of c in the derivative c + x*p of gelu, where c is the normal distribution and p its "
        "density",
        Change(part="derivative", way="first-of-gelu", number=0.0),
    ),
    say(
        "embed",
        "weight",
        "with the last token of each call alone that looked up a row",
        Change(part="occurrences", way="last-alone"),
    ),
    say(
        "layers.0.attention.q_proj",
        "bias",
        "without the last token of each call, and on ranks 0, 1 alone",
        Change(part="tokens", way="without-last", number=1),
        Change(part="where", way="calls-of-ranks", name="0,1"),
    ),
    say(
        "layers.1.moe.experts",
        "up",
        "with whole blocks of 8 rows of each expert in a call alone, without what is left over",
        Change(part="expert-rows", way="whole-tiles", number=8),
    ),
    say(
        "norm",
        "weight",
        "without part 1 of 4 equal parts of the tokens of each call",
        Change(part="tokens", way="without-chunk", number=1, name="4"),
    ),
    say(
        "layers.0.attention.v_proj",
        "weight",
        "with the input of the micro-batch before, in each after the first",
        Change(part="input", way="of-micro-batch-before"),
    ),
]
