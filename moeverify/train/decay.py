"""Decays of the learning rate after the warmup. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from moeverify.cases.choice import Row, Table


@dataclass(frozen=True, kw_only=True)
class Decay(Row):
    """A decay; `factor` maps its elapsed fraction, 0 to 1, to a multiplier of the learning rate."""

    factor: Callable[[float], float]


RATE_SCHEDULE: Table[Decay] = Table(
    path="recipe.optimizer.schedule",
    home=__name__,
    rows={
        "constant": Decay(meaning="The rate stays.", factor=lambda part: 1.0),
        "cosine": Decay(
            meaning="Half a cosine down to 0.", factor=lambda part: 0.5 * (1.0 + math.cos(math.pi * part))
        ),
        "linear": Decay(meaning="A line down to 0.", factor=lambda part: 1.0 - part),
    },
)
