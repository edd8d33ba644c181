"""Hypothesis: a loss term is computed in another way, which its own value shows."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, Scope, explain_by
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.checks import Kind
from moeverify.results.explanation import Quantity
from moeverify.results.observation import ScalarValues
from moeverify.results.operation import Altered
from moeverify.results.trial import Reason

TOTAL = "total"  # the sum of the terms, which says nothing of its own


class LossValue(Hypothesis):
    """The gradients are no sum of right parts, and the value of a loss term is wrong over right module outputs."""

    name = "loss_value"
    quantities = frozenset({Quantity.GRADIENT})

    def scopes(self, quantity: Quantity) -> tuple[Scope, ...]:
        """Return that all gradients which are left have this one cause."""
        del quantity
        return (Scope.TOGETHER,)

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Look at the losses."""
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
        # The subject is the loss, and what it explains are the gradients.
        return self.accept(explain_by(Cause.FORWARD, Altered(), losses, inputs), *seen)


HYPOTHESIS = LossValue()
