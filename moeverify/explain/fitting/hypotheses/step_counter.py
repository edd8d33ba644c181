"""Hypothesis: an optimizer's step counter is wrong, and with it the bias correction."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.observation import ScalarValues
from moeverify.results.operation import Stepped

COUNTER = ".step"
"""Suffix of the names of step counters in torch optimizers."""


class StepCounter(Hypothesis):
    """A counter has another integer than the golden's."""

    name = "step_counter"
    quantities = frozenset({Quantity.OPTIMIZER_STATE})

    def applies(self, tensor: WrongTensor, inputs: DiagnosisInputs) -> bool:
        """Return whether the tensor is a step counter."""
        return super().applies(tensor, inputs) and is_counter(tensor)

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome | None:
        """Compare the numbers."""
        (tensor,) = tensors
        worst = tensor.worst_shard
        expected, actual = float(tensor.expected), float(worst.values())
        seen = ScalarValues(expected=expected, actual=actual, rank=worst.rank)
        if actual == expected or actual != round(actual):
            return None
        operation = Stepped(num_steps=round(actual - expected))
        return self.accept(explain_by(Cause.STATE, operation, tensors, inputs), seen)


def is_counter(tensor: WrongTensor) -> bool:
    """Return whether a tensor is an optimizer's step counter."""
    return tensor.expected.numel() == 1 and tensor.name.endswith(COUNTER)


HYPOTHESIS = StepCounter()
