"""One step of an optimizer written as sums of known terms, so that it can be computed again beside the optimizer.

What a rank has computed is compared with these sums in float64; each comes with how many roundings of the optimizer's
own dtype the optimizer may have made on the way. No torch is imported: the kinds of optimizers are read by processes
that have none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

WEIGHT = "weight"
"""The name of the recomputed value that is the weight's change; all others are moments."""


@dataclass(frozen=True)
class StepValues:
    """What one step of an optimizer works on, for the elements (N,) of parameters that share their options.

    All in float64. `gradient` is the clipped one. `before` and `after` have the moments by name, before and after the
    step; a moment that the step makes is not in `before`. `number` counts the steps from 1.
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
    """A part of a recomputed value: `coefficient` times `values` (N,)."""

    name: str
    coefficient: float
    values: Tensor


@dataclass(frozen=True)
class Recomputed:
    """What the step should have made: the sum of `terms` for a moment, or for the change of the weight.

    The optimizer rounds on the way, besides its result: `rounded` (N,) is the sum of the sizes of its intermediate
    results, each as often as it may be rounded to the dtype of its tensors. So may its options be: with `foreach` and
    bfloat16 on a CPU, torch 2.13 multiplies by 0.94921875 where the option is 0.95. Kernels that keep results in
    float32 registers round less. `options` (N,) are the same of errors by options that a kernel rounds to the dtype
    that it computes in: float32 where the tensors are of 16 bits, else their own. `smallest` is the largest error by
    results that are too small for the dtype, in units of its smallest normal number. `shrunk_by` is what the weight
    is multiplied by first: the factor and the product may each be rounded, or neither. `squared` (N,) are the sizes
    of products of two numbers that are rounded before, and may be small beside what is rounded, since they are sums.
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
        """Return the sum of the terms, (N,)."""
        first, *rest = self.terms
        total = first.coefficient * first.values
        for term in rest:
            total = total + term.coefficient * term.values
        return total
