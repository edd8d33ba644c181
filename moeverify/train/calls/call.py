"""A call of a training loop, as data. No torch."""

from __future__ import annotations

from typing import Literal

from moeverify.results.record import Record


class LoopCall(Record):
    """One call of the training loop.

    `step` is the number of optimizer steps before the call, and `site` the file:line of the caller.
    `losses` are the values from which a backward pass starts. `discarded` is the norm of the gradients that
    a `zero_grad` discarded. `kept` is the norm of the gradients that existed before the first backward pass
    of a step. `norm` and `max_norm` belong to a clip, and `target` identifies its parameters within this
    process. `scale` is the loss scale of a gradient scaler's call.
    """

    line: Literal["call"] = "call"
    step: int
    name: str
    site: str = ""
    losses: tuple[float, ...] = ()
    discarded: float = 0.0
    kept: float = 0.0
    norm: float | None = None
    max_norm: float | None = None
    target: int = 0
    scale: float | None = None
