"""Hypothesis: a loss is reported with the value of another term."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.wrong_tensor import EXACT, WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.checks import Kind
from moeverify.results.explanation import Quantity
from moeverify.results.observation import ScalarValues
from moeverify.results.operation import Replaced
from moeverify.results.trial import Reason

_LOSSES = ("lm", "balance", "z")


class AnotherTerm(Hypothesis):
    """The number is what the golden has for another term: losses that were stacked are read in another order.

    Asked in float64 alone, where two of three numbers are equal to eight digits by no chance.
    """

    name = "another_term"
    quantities = frozenset({Quantity.LOSS})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Compare with the golden's other terms."""
        (tensor,) = tensors
        if tensor.key[1] != Kind.LOSS or tensor.name not in _LOSSES or tensor.precision != torch.float64:
            return self.untried(Reason.NOT_COMPARABLE)
        worst = tensor.worst_shard
        actual = float(worst.values())
        seen = ScalarValues(expected=float(tensor.expected), actual=actual, rank=worst.rank)
        for other in _LOSSES:
            value = inputs.golden(Kind.LOSS, other, 0) if other != tensor.name else None
            if value is None or not float(value) or abs(actual - float(value)) > EXACT * abs(float(value)):
                continue
            operation = Replaced(by="tensor", tensor=other)
            return self.accept(explain_by(Cause.METRIC, operation, tensors, inputs), seen, about=other)
        return self.refuse(seen)


HYPOTHESIS = AnotherTerm()
