"""Hypothesis: the balance loss is taken over other tokens at a time than it should."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, Scope, explain_by
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.replaced_term import find_parts, fit_replaced
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.operation import Rescoped
from moeverify.results.trial import Reason

_TERM = "balance"


class OtherScope(Hypothesis):
    """All wrong gradients have the balance term of another scope, once, in the place of the right one."""

    name = "other_scope"
    quantities = frozenset({Quantity.GRADIENT})
    generalizes = ("detached", "one_factor", "loss_terms")

    own_scopes = (Scope.TOGETHER,)
    """All wrong gradients have this one cause."""

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Fit the errors on what the other term would add and the right one does not."""
        parts = find_parts(_TERM, tensors, inputs)
        if isinstance(parts, Reason):
            return self.untried(parts)
        components, right = parts
        for scope, vector in components.by_scope().items():
            fit = fit_replaced(tensors, right, vector)
            if fit is not None:
                operation = Rescoped(term=_TERM, scope=scope)
                explanation = explain_by(Cause.FORWARD, operation, tensors, inputs, residual=fit.residual)
                outcome = self.accept(explanation, residual=fit.residual)
                return replace(outcome, num_coefficients=1)
        return self.refuse()


HYPOTHESIS = OtherScope()
