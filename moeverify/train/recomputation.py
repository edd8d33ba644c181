"""One optimizer step as sums of known terms, recomputed in float64 beside the optimizer.

Each sum carries the rounding errors that the optimizer may have made in its own dtype. The module imports
no torch: processes without torch read the kinds of optimizers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

WEIGHT = "weight"
"""Name of the recomputed weight change; all other names are moments."""


@dataclass(frozen=True)
class StepValues:
    """Inputs and results of an optimizer step, for elements (N,) with the same options. Float64.

    `gradient` is already clipped. `before` and `after` map moment names to values before and after the
    step. A moment that the step creates is not in `before`. `number` counts the steps from 1.
    """

    number: int
    lr: float
    weight_decay: float
    weight: Tensor
    gradient: Tensor
    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]


@dataclass(frozen=True)
class Term:
    """A summand of a recomputed value: `coefficient` times `values` (N,)."""

    name: str
    coefficient: float
    values: Tensor


@dataclass(frozen=True)
class Recomputed:
    """The expected moment or weight change of a step: the sum of `terms`, with limits of rounding.

    - `rounded` (N,): sum of the magnitudes of intermediate results, each counted once per rounding to the
      tensors' dtype. Options may be rounded too: with `foreach` and bfloat16 on a CPU, torch 2.13
      multiplies by 0.94921875 where the option is 0.95. Kernels with float32 intermediates round less.
    - `options` (N,): the same for options that a kernel rounds to its compute dtype. That is float32 for
      16-bit tensors and otherwise the tensors' own dtype.
    - `smallest`: the largest error from underflow, in units of the dtype's smallest normal number.
    - `shrunk_by`: factor that multiplies the weight first. Factor and product may each be rounded.
    - `squared` (N,): magnitudes of products of two previously rounded sums. They may be small beside the
      rounding errors of their factors.
    """

    name: str
    terms: Sequence[Term]
    rounded: Tensor
    options: Tensor | float = 0.0
    smallest: float = 4.0
    shrunk_by: float | None = None
    squared: Tensor | float = 0.0

    @property
    def expected(self) -> Tensor:
        """Return the sum of the terms (N,)."""
        first, *rest = self.terms
        total = first.coefficient * first.values
        for term in rest:
            total = total + term.coefficient * term.values
        return total
