"""Hypothesis: the norm is right, and the gradients were not clipped by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moeverify.diagnose.fit import fit_multiple
from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.diagnose.hypotheses.linear_fit import list_contributions
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.factor import is_same
from moeverify.results.operation import Unclipped
from moeverify.results.trial import Reason


class UnclippedHypothesis(Hypothesis):
    """The update is 1/c times the right one, where c is the clip coefficient that should have been applied."""

    name = "unclipped"
    quantities = frozenset({Quantity.UPDATE, Quantity.OPTIMIZER_STATE})

    def applies(self, tensor: WrongTensor, inputs: DiagnosisInputs) -> bool:
        """Return whether the gradients should have been clipped."""
        clips = inputs.clip is not None and not is_same(inputs.clip, 1.0)
        return clips and super().applies(tensor, inputs)

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Compare the factor of the update with the coefficient."""
        (tensor,) = tensors
        assert inputs.clip is not None
        fit = fit_multiple(tensor)
        if fit is None:
            return self.untried(Reason.TOO_FEW_NUMBERS)
        fit = fit.settle([1.0 / inputs.clip]) if fit.explains and inputs.clip else fit
        measured: dict[str, Any] = {
            "contributions": list_contributions(fit, ()),
            "residual": fit.residual,
        }
        if not (fit.explains and is_same(fit.coefficients[0] * inputs.clip, 1.0)):
            return self.refuse(**measured)
        operation = Unclipped(coefficient=inputs.clip)
        explanation = explain_by(Cause.NORM, operation, tensors, inputs, residual=fit.residual)
        return self.accept(explanation, **measured)


HYPOTHESIS = UnclippedHypothesis()
