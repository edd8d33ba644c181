"""Hypothesis: a parameter started with the values of another one: a layer or stage is a copy of another."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.checks import Kind
from moeverify.results.explanation import Quantity
from moeverify.results.operation import Replaced
from moeverify.results.trial import Reason


class AnotherLayer(Hypothesis):
    """It has exactly the initial values of a parameter of another name and the same shape."""

    name = "another_layer"
    quantities = frozenset({Quantity.INITIAL_VALUE})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Compare with the golden's initial values of all parameters."""
        (tensor,) = tensors
        actual = tensor.whole
        # Constants, such as the ones of a norm, are alike in all layers and say nothing.
        if actual.numel() < 2 or bool((actual == actual.reshape(-1)[0]).all()):
            return self.untried(Reason.NOT_COMPARABLE)
        for name in inputs.regions:
            if name == tensor.name:
                continue
            other = inputs.golden(Kind.INITIAL_WEIGHT, name, 0)
            if (
                other is not None
                and other.shape == actual.shape
                and torch.equal(other.to(actual.dtype), actual)
            ):
                operation = Replaced(by="tensor", tensor=name)
                return self.accept(explain_by(Cause.DUPLICATE, operation, tensors, inputs), about=name)
        return self.refuse()


HYPOTHESIS = AnotherLayer()
