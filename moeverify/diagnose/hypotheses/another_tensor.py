"""Hypothesis: it has the values of another tensor that was saved."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.operation import Replaced
from moeverify.results.trial import Reason


class AnotherTensor(Hypothesis):
    """It equals another saved tensor of its shape; if that one is wrong too, the two were exchanged."""

    name = "another_tensor"
    quantities = frozenset({Quantity.LOADED})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Compare with all saved tensors of the same shape."""
        (tensor,) = tensors
        actual, saved = tensor.whole, inputs.saved
        if saved is None or actual.numel() < 2 or not bool(actual.any()):
            return self.untried(Reason.NOT_COMPARABLE)
        for other in saved.by_shape.get(tuple(tensor.expected.shape), ()):
            if other == tensor.name:
                continue
            values = saved.read(other)
            if values is None or not torch.equal(values.to(torch.float64), actual):
                continue
            exchanged = other in saved.wrong
            operation = Replaced(by="tensor", tensor=other, exchanged=exchanged)
            cause = Cause.PERMUTATION if exchanged else Cause.DUPLICATE
            return self.accept(explain_by(cause, operation, tensors, inputs), about=other)
        return self.refuse()


HYPOTHESIS = AnotherTensor()
