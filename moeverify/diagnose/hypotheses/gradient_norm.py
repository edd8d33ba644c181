"""Hypothesis: the gradients match, and their norm, or the clip coefficient made of it, is computed incorrectly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeverify.diagnose.factors import find_factor
from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.diagnose.inputs import STEP_BEFORE, DiagnosisInputs
from moeverify.diagnose.wrong_tensor import EXACT, WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.observation import Observation, RankValues, ScalarValues
from moeverify.results.operation import Replaced, Scaled
from moeverify.results.part import WHOLE, Contribution


class GradientNorm(Hypothesis):
    """The norm is off although all gradients are right.

    A norm is a root of a sum of squares over ranks: a square that is counted n times, or divided by n ranks, makes
    it the root of n times the right one, so the square of the factor is what sources are found for.
    """

    name = "gradient_norm"
    quantities = frozenset({Quantity.GRADIENT_NORM, Quantity.CLIP_COEFFICIENT})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Measure the factor on the rank that is furthest off, and whether the ranks agree."""
        (tensor,) = tensors
        worst = tensor.worst_shard
        expected, actual = float(tensor.expected), float(worst.values())
        before = inputs.earlier(tensor.key).get(STEP_BEFORE)
        if tensor.precision == torch.float64 and before is not None and _is_old(actual, expected, before):
            old = explain_by(Cause.STALE, Replaced(by="step-before"), tensors, inputs)
            return self.accept(old, ScalarValues(expected=expected, actual=actual, rank=worst.rank))
        ratio = actual / expected if expected else float("inf")
        factor = find_factor(ratio, inputs.sources_of(tensors), power=2)
        operation = Scaled(contributions=(Contribution(part=WHOLE, factor=factor),))
        explanation = explain_by(Cause.NORM, operation, tensors, inputs)
        seen: list[Observation] = [ScalarValues(expected=expected, actual=actual, rank=worst.rank)]
        values = sorted({float(shard.values()) for shard in tensor.shards if shard.local is not None})
        if len(values) > 1:
            seen.append(RankValues(values=tuple(values)))
        return self.accept(explanation, *seen)


def _is_old(actual: float, expected: float, before: Tensor) -> bool:
    """Return whether a number is that of the step before, where that is another one: to eight digits by no chance."""
    value = float(before)
    return abs(actual - value) <= EXACT * abs(value) < abs(expected - value)


HYPOTHESIS = GradientNorm()
