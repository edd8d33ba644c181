"""Explanations with their sentences: which tokens count for the gradient of a parameter."""

from __future__ import annotations

from typing import Any

from explanations import GRADIENT, explain

from moeverify.results.cause import Cause
from moeverify.results.change import Change
from moeverify.results.operation import Varied


def say(module: str, of: str, sentence: str, *changes: Change) -> tuple[Any, str, str]:
    operation = Varied(formula=f"parameter:{of}", variants=(changes,))
    explanation = explain(Cause.BACKWARD, GRADIENT, operation, tensors=(f"{module}.{of}",), module=module)
    return explanation, f"{module} makes the gradient of its {of} {sentence}", module


PARAMETERS = [
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
