"""Hypothesis: the loss and its gradient are scaled, in a precision that hides the factor.

In float64, one factor fits all gradients to eight digits, without the loss values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, Scope, explain_by
from moeverify.explain.fitting.hypotheses.loss_value import TOTAL
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.checks import Kind
from moeverify.results.explanation import Quantity
from moeverify.results.factor import Factor
from moeverify.results.observation import ScalarValues
from moeverify.results.operation import Scaled
from moeverify.results.part import WHOLE, Contribution
from moeverify.results.trial import Reason

_NEAR = 3e-3
"""Allowed difference of the factors of the loss and of its gradients, added to their noise: a unit of bfloat16."""


class ScaledLoss(Hypothesis):
    """All loss terms have the same factor, and by least squares the gradients have it too.

    The residual of the gradients is their noise. It must be at most a third of the change by the factor: a
    loss with a different formula, whose value happens to be off by some factor, also changes the direction
    of its gradient.
    """

    name = "scaled_loss"
    quantities = frozenset({Quantity.GRADIENT})

    own_scopes = (Scope.TOGETHER,)
    """All remaining gradients have this one cause."""

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Compare the factor of the total loss with the common factor of all gradients."""
        losses = [loss for loss in inputs.of_quantity(Quantity.LOSS) if loss.key[1] == Kind.LOSS]
        total = next((loss for loss in losses if loss.name == TOTAL), None)
        if total is None or tensors[0].precision == torch.float64:
            return self.untried(Reason.LOSSES_MATCH if total is None else Reason.NOT_COMPARABLE)
        factor = _find_ratio(total)
        seen = ScalarValues(
            name=TOTAL,
            expected=float(total.expected),
            actual=float(total.worst_shard.values()),
            rank=total.worst_shard.rank,
        )
        found, left = _fit(tensors)
        are_alike = all(abs(_find_ratio(loss) - factor) <= _NEAR * abs(factor) for loss in losses)
        is_clear = left <= abs(factor - 1.0) / 3.0
        if not are_alike or not is_clear or not abs(found - factor) <= (_NEAR + left / 3.0) * abs(factor):
            return self.refuse(seen)
        rounded = Factor(value=float(f"{factor:.3g}"))
        operation = Scaled(contributions=(Contribution(part=WHOLE, factor=rounded),))
        return self.accept(explain_by(Cause.SCALE, operation, tensors, inputs, residual=left), seen)


def _find_ratio(loss: WrongTensor) -> float:
    expected = float(loss.expected)
    return float(loss.worst_shard.values()) / expected if expected else float("nan")


def _fit(tensors: Sequence[WrongTensor]) -> tuple[float, float]:
    """Return (k, relative residual) of all gradients together as k times their goldens."""
    products = squares = actual = 0.0
    for tensor in tensors:
        found = tensor.whole
        products += float((found * tensor.expected).sum())
        squares += float(tensor.expected.square().sum())
        actual += float(found.square().sum())
    if not squares or not actual:
        return float("nan"), float("nan")
    left = max(actual - products * products / squares, 0.0)
    return products / squares, (left / actual) ** 0.5


HYPOTHESIS = ScaledLoss()
