"""Hypothesis: a loss term is computed by another formula, so its own value is wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moeverify.explain.fitting.factors import find_factor
from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, Scope, explain_by
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.checks import Kind
from moeverify.results.explanation import Quantity
from moeverify.results.observation import ScalarValues
from moeverify.results.operation import Altered, Offset
from moeverify.results.trial import Reason

_LARGEST_OFFSET = 50.0  # beyond this, the exponential is no number of ranks
TOTAL = "total"  # the sum of the terms, without information of its own


class LossValue(Hypothesis):
    """The gradients are no sum of right parts, and a loss term is wrong although module outputs are right."""

    name = "loss_value"
    quantities = frozenset({Quantity.GRADIENT})

    own_scopes = (Scope.TOGETHER,)
    """All remaining gradients have this one cause."""

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Check the values of the losses."""
        losses = [
            loss
            for loss in inputs.of_quantity(Quantity.LOSS)
            if loss.key[1] == Kind.LOSS and loss.name != TOTAL
        ]
        if not losses:
            return self.refuse(reason=Reason.LOSSES_MATCH)
        seen = [
            ScalarValues(
                name=loss.name,
                expected=float(loss.expected),
                actual=float(loss.worst_shard.values()),
                rank=loss.worst_shard.rank,
            )
            for loss in losses
        ]
        # The subject is the loss; it explains the gradients.
        offset = _find_offset(losses, inputs)
        if offset is None and inputs.search is None:
            # In 16 bits, modules are not compared: the input of the loss may have been wrong.
            return self.untried(Reason.MODULES_NOT_COMPARED)
        operation = offset or Altered()
        return self.accept(explain_by(Cause.FORWARD, operation, losses, inputs), *seen)


def _find_offset(losses: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Offset | None:
    """Return a constant offset of the only wrong loss, if its exponential is a product of axis sizes.

    This happens if a log-sum-exp adds each exponential several times.
    """
    if len(losses) != 1:
        return None
    (loss,) = losses
    value = float(loss.worst_shard.values()) - float(loss.expected)
    found = find_factor(math.exp(value), inputs.axes.sources) if abs(value) < _LARGEST_OFFSET else None
    return Offset(value=value, products=found.equals) if found is not None and found.equals else None


HYPOTHESIS = LossValue()
