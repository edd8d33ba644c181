"""Hypothesis: the tensor has its value of another time, the previous step or the start."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import EXACT, WrongTensor, measure_distance
from moeverify.results.cause import Cause
from moeverify.results.explanation import Explanation, Quantity
from moeverify.results.operation import Replaced, Unmoved


class PreviousValue(Hypothesis):
    """Nothing was accumulated or counted, the step changed no state, or a checkpoint has an older state."""

    name = "previous_value"
    quantities = frozenset(
        {
            Quantity.GRADIENT,
            Quantity.ROUTING_COUNT,
            Quantity.BUFFER,
            Quantity.OPTIMIZER_STATE,
            Quantity.LOADED,
        }
    )

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome | None:
        """Compare with the golden's value a step earlier."""
        (tensor,) = tensors
        value = inputs.earlier(tensor.key)
        if value is None or value.numel() != tensor.expected.numel():
            return None
        error, right = measure_distance(tensor, value)
        # A value that equals the expected one too is no evidence.
        return self.accept(self._explain(tensor, inputs)) if error < EXACT <= right else None

    def _explain(self, tensor: WrongTensor, inputs: DiagnosisInputs) -> Explanation:
        if tensor.quantity is Quantity.LOADED:
            return explain_by(Cause.STATE, Replaced(by="step-before"), [tensor], inputs)
        if tensor.quantity in (Quantity.GRADIENT, Quantity.ROUTING_COUNT):
            return explain_by(Cause.STALE, Replaced(by="step-before"), [tensor], inputs)
        return explain_by(Cause.STALE, Unmoved(), [tensor], inputs)


HYPOTHESIS = PreviousValue()
