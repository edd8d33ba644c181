"""The weights of routed experts as arguments of an expert backend.

Letters: E (local) experts, H hidden, F expert hidden (local).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class PlacedRows:
    """Rows of the stacked weights from `start`: the experts `indices` of `num_rows` experts in the model."""

    start: int
    indices: tuple[int, ...]
    num_rows: int


class ExpertWeights(NamedTuple):
    """gate and up (E, F, H), down (E, H, F), gate_bias and up_bias (E, F), down_bias (E, H), or no biases."""

    gate: Tensor
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
