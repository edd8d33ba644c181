"""Hypothesis: a parameter has the value or gradient of another one, as in a copied layer or stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeverify.explain.fitting.families import module_of
from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.checks import Kind
from moeverify.results.explanation import Quantity
from moeverify.results.operation import Replaced
from moeverify.results.trial import Reason

_KINDS = {
    Quantity.INITIAL_VALUE: Kind.INITIAL_WEIGHT,
    Quantity.ROUTING_COUNT: Kind.ROUTER_COUNTS,
    Quantity.GRADIENT: Kind.GRADIENT,
}


class AnotherLayer(Hypothesis):
    """The values equal the initial values, the gradient or the counts of another parameter or router.

    A gradient of another parameter results from reading a buffer that still contains an earlier layer's
    gradients.
    """

    name = "another_layer"
    quantities = frozenset({Quantity.INITIAL_VALUE, Quantity.ROUTING_COUNT, Quantity.GRADIENT})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Compare with the golden's values of all parameters, or the counts of all routers."""
        (tensor,) = tensors
        is_count = tensor.quantity is Quantity.ROUTING_COUNT
        kind = _KINDS[tensor.quantity]
        actual = tensor.whole
        # Constants, such as the ones of a norm, are equal in all layers and prove nothing.
        if actual.numel() < 2 or bool((actual == actual.reshape(-1)[0]).all()):
            return self.untried(Reason.NOT_COMPARABLE)
        # Routers are named after their modules, and have parameters.
        for name in dict.fromkeys(module_of(each) if is_count else each for each in inputs.regions):
            if name == tensor.name:
                continue
            other = inputs.golden(kind, name, 0)
            if other is not None and other.shape == actual.shape and _is_same(tensor, other.to(actual.dtype)):
                operation = Replaced(by="tensor", tensor=name)
                return self.accept(explain_by(Cause.DUPLICATE, operation, tensors, inputs), about=name)
        return self.refuse()


def _is_same(tensor: WrongTensor, other: Tensor) -> bool:
    """Return whether a tensor has the values of another.

    Gradients, which are sums, may differ by rounding.
    """
    if tensor.quantity is not Quantity.GRADIENT:
        return torch.equal(other, tensor.whole)
    norm = float(other.norm())
    return norm > 0.0 and float((tensor.whole - other).norm()) <= tensor.exact * norm


HYPOTHESIS = AnotherLayer()
