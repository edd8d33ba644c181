"""Hypothesis: a module computes with its weights of the previous step."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.operation import Replaced


class StaleWeightsHypothesis(Hypothesis):
    """The module's own input and its previous weights produce the wrong output that was read."""

    name = "stale_weights"
    quantities = frozenset({Quantity.OUTPUT})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome | None:
        """Run the module with the golden's weights of the previous step."""
        (tensor,) = tensors
        origin = inputs.origin_of(tensor)
        if origin is None or not inputs.stale(origin):
            return None
        operation = Replaced(by="weights-of-step-before")
        return self.accept(explain_by(Cause.STALE, operation, tensors, inputs))


HYPOTHESIS = StaleWeightsHypothesis()
