"""A call of a training loop, as data. No torch."""

from __future__ import annotations

from typing import Literal

from moeverify.results.record import Record


class Call(Record):
    """A call of the training loop, in the order in which they came.

    `step` is the number of optimizer steps before it, `site` the file:line of the caller. `losses` are the numbers
    that a backward pass began with, `discarded` is the norm of the gradients that a `zero_grad` threw away, and
    `kept` that of the gradients that were there before the first backward pass of a step.
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
