"""Explanations with their sentences: steps that ranks make otherwise than one device."""

from __future__ import annotations

from typing import Any

from explanations import explain

from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.other_steps import OtherStep, OtherSteps, Term

GATE = Term(module="mlp.gate_proj", end="output")
SCORES = Term(operator="mul", options=("0.5",), line="attention.py:37")
SOFTMAX = Term(operator="_softmax", options=("-1",), line="attention.py:40", args=(SCORES,))


def say(sentence: str, *steps: OtherStep, cause: Cause = Cause.FORWARD) -> tuple[Any, str, str]:
    quantity = Quantity.OUTPUT if cause is Cause.FORWARD else Quantity.MODULE_GRADIENT
    return explain(cause, quantity, OtherSteps(steps=steps, num_ranks=2), module="mlp"), sentence, "mlp"


STEPS = [
    say(
        "the output of mlp is made as on one device, but with 0.25 in place of 0.5 in mul at mine.py:3, and "
        "without softmax(the result of mul(0.5) at attention.py:37, -1) at attention.py:40",
        OtherStep(
            way="number", right=SCORES, wrong=Term(operator="mul", options=("0.25",), line="mine.py:3")
        ),
        OtherStep(way="left-out", right=SOFTMAX),
    ),
    say(
        "the output of mlp is made as on one device, but with a further clamp(the output of mlp.gate_proj, "
        "0.5) at mine.py:9, and with div at mine.py:3 in place of mul at attention.py:37",
        OtherStep(
            way="added", wrong=Term(operator="clamp", options=("0.5",), line="mine.py:9", args=(GATE,))
        ),
        OtherStep(way="function", right=SCORES, wrong=Term(operator="div", line="mine.py:3")),
    ),
    say(
        "the output of mlp is made as on one device, but with a tensor from before the step in place of "
        "mlp.up_proj.weight, and with other elements brought together in matmul at mine.py:4, of the same values",
        OtherStep(way="operand", right=Term(name="mlp.up_proj.weight"), wrong=Term()),
        OtherStep(
            way="order", right=Term(operator="mm"), wrong=Term(operator="mm", line="mine.py:4", args=(GATE,))
        ),
    ),
    say(
        "the gradient that mlp passes back is made as on one device, but with mul(the gradient of the "
        "output of mlp, the result of sigmoid at mine.py:7) at mine.py:8 in place of silu_backward(the gradient of "
        "the output of mlp, the output of mlp.gate_proj)",
        OtherStep(
            way="other",
            right=Term(
                operator="silu_backward", args=(Term(module="mlp", end="output", is_gradient=True), GATE)
            ),
            wrong=Term(
                operator="mul",
                line="mine.py:8",
                args=(
                    Term(module="mlp", end="output", is_gradient=True),
                    Term(operator="sigmoid", line="mine.py:7"),
                ),
            ),
        ),
        cause=Cause.BACKWARD,
    ),
    say(
        "the output of mlp is made as on one device, but with the result of arange(8) at mine.py:2 in place of "
        "the input `positions` of the model, and with a further mul(the output of mlp.gate_proj, 1.5) at mine.py:3 "
        "on rank 1 alone, and with other rows taken in index_select at mine.py:5",
        OtherStep(
            way="other",
            right=Term(module="", end="input", slot="positions"),
            wrong=Term(operator="arange", options=("8",), line="mine.py:2"),
        ),
        OtherStep(
            way="added",
            wrong=Term(operator="mul", options=("1.5",), line="mine.py:3", args=(GATE,)),
            ranks=(1,),
        ),
        OtherStep(
            way="index",
            wrong=Term(operator="index_select", line="mine.py:5", args=(GATE,)),
        ),
    ),
    say(
        "the output of mlp is made as on one device, but without cat(the output of mlp.gate_proj, and 8 more) at "
        "mine.py:4",
        OtherStep(way="left-out", right=Term(operator="cat", line="mine.py:4", args=(GATE,) * 9)),
    ),
    say(
        "the output of mlp is made as on one device, but with the parameters of layers.0 in place of the parameters "
        "of layers.1, and with the result of tensor at mine.py:2 in place of pow(the output of mlp.gate_proj), 10 "
        "times the right one, and with other elements brought together in mul(the output of mlp.gate_proj) at "
        "mine.py:4, of the same values",
        OtherStep(
            way="operand",
            right=Term(module="layers.1", end="parameters"),
            wrong=Term(module="layers.0", end="parameters"),
        ),
        OtherStep(
            way="other",
            right=Term(operator="pow", args=(GATE,)),
            wrong=Term(operator="tensor", line="mine.py:2"),
            factor=10.0,
        ),
        OtherStep(
            way="order",
            right=Term(operator="mul", args=(GATE,)),
            wrong=Term(operator="mul", line="mine.py:4", args=(GATE,)),
        ),
    ),
]
