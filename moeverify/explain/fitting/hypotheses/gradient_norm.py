"""Hypothesis: gradients match, but their norm or the clip coefficient is computed incorrectly."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from moeverify.explain.fitting.factors import find_factor
from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import EXACT, WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.observation import Observation, RankValues, ScalarValues
from moeverify.results.operation import Replaced, Scaled
from moeverify.results.part import WHOLE, Contribution

_LEAST = 3.5
"""Minimum exponent of a power of two that is a loss scale, and not a number of ranks: 16 or more."""

_NEAR = 4e-3
"""Tolerance of an exponent of two; one in 120 other ratios is as close to an integer."""


class GradientNorm(Hypothesis):
    """The norm is wrong although all gradients are right.

    A norm is the root of a sum of squares over ranks. If a square is counted n times, or divided by n
    ranks, the norm is off by a root of n, so sources are searched for the square of the factor.
    """

    name = "gradient_norm"
    quantities = frozenset({Quantity.GRADIENT_NORM, Quantity.CLIP_COEFFICIENT})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome | None:
        """Measure the factor on the worst rank, and whether ranks agree."""
        (tensor,) = tensors
        worst = tensor.worst_shard
        expected, actual = float(tensor.expected), float(worst.values())
        before = inputs.earlier(tensor.key)
        if tensor.precision == torch.float64 and before is not None and _is_old(actual, expected, before):
            old = explain_by(Cause.STALE, Replaced(by="step-before"), tensors, inputs)
            return self.accept(old, ScalarValues(expected=expected, actual=actual, rank=worst.rank))
        ratio = actual / expected if expected else float("inf")
        factor = find_factor(ratio, inputs.sources_of(tensors), power=2)
        is_norm = tensor.quantity is Quantity.GRADIENT_NORM and not factor.equals
        operation = Scaled(
            contributions=(Contribution(part=WHOLE, factor=factor),),
            loss_scale=find_loss_scale(ratio) if is_norm else 0,
        )
        explanation = explain_by(Cause.NORM, operation, tensors, inputs)
        seen: list[Observation] = [ScalarValues(expected=expected, actual=actual, rank=worst.rank)]
        values = sorted({float(shard.values()) for shard in tensor.shards if shard.local is not None})
        if len(values) > 1:
            seen.append(RankValues(values=tuple(values)))
        return self.accept(explanation, *seen)


def find_loss_scale(ratio: float) -> int:
    """Return n if a ratio is 2^n, with a factor of at least 16 or 1/16; 0 for other ratios.

    The tolerance is the precision of a norm in 16 bits.
    """
    if not 0.0 < ratio < math.inf:
        return 0
    exponent = math.log2(ratio)
    return round(exponent) if abs(exponent - round(exponent)) < _NEAR and abs(exponent) > _LEAST else 0


def _is_old(actual: float, expected: float, before: Tensor) -> bool:
    """Return whether a number equals that of the previous step to eight digits, unlike the expected one."""
    value = float(before)
    return abs(actual - value) <= EXACT * abs(value) < abs(expected - value)


HYPOTHESIS = GradientNorm()
