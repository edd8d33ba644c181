"""Hypothesis: a parameter started with the values of another one: a layer or stage is a copy of another."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeverify.diagnose.families import module_of
from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.checks import Kind
from moeverify.results.explanation import Quantity
from moeverify.results.operation import Replaced
from moeverify.results.trial import Reason


class AnotherLayer(Hypothesis):
    """It has exactly what another parameter of its shape begins with, or another router counts."""

    name = "another_layer"
    quantities = frozenset({Quantity.INITIAL_VALUE, Quantity.ROUTING_COUNT})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Compare with the golden's initial values of all parameters, or counts of all routers."""
        (tensor,) = tensors
        is_count = tensor.quantity is Quantity.ROUTING_COUNT
        kind = Kind.ROUTER_COUNTS if is_count else Kind.INITIAL_WEIGHT
        actual = tensor.whole
        # Constants, such as the ones of a norm, are alike in all layers and say nothing.
        if actual.numel() < 2 or bool((actual == actual.reshape(-1)[0]).all()):
            return self.untried(Reason.NOT_COMPARABLE)
        # Routers are named by their modules, and have parameters.
        for name in dict.fromkeys(module_of(each) if is_count else each for each in inputs.regions):
            if name == tensor.name:
                continue
            other = inputs.golden(kind, name, 0)
            if (
                other is not None
                and other.shape == actual.shape
                and torch.equal(other.to(actual.dtype), actual)
            ):
                operation = Replaced(by="tensor", tensor=name)
                return self.accept(explain_by(Cause.DUPLICATE, operation, tensors, inputs), about=name)
        return self.refuse()


HYPOTHESIS = AnotherLayer()
