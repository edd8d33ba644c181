"""Hypothesis: a module is right in the first micro-batch, so state changed too early within the step."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.operation import Altered


class LaterMicroBatch(Hypothesis):
    """A module is wrong from a later micro-batch on: state that should change once a step changed earlier."""

    name = "later_micro_batch"
    quantities = frozenset({Quantity.OUTPUT})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Check the first micro-batch in which a rank is wrong."""
        (tensor,) = tensors
        origin = inputs.origin_of(tensor)
        if origin is None or origin.first_micro_batch == 0:
            return self.refuse()
        operation = Altered(first_micro_batch=origin.first_micro_batch)
        return self.accept(explain_by(Cause.STATE, operation, tensors, inputs))


HYPOTHESIS = LaterMicroBatch()
