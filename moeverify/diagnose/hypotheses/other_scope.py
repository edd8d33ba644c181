"""Hypothesis: the balance loss is taken over other tokens at a time than it should."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from moeverify.diagnose.fit import fit_columns
from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, Scope, explain_by
from moeverify.diagnose.hypotheses.linear_fit import knows
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.factor import is_same
from moeverify.results.operation import Rescoped
from moeverify.results.part import WHOLE
from moeverify.results.trial import Reason

_TERM = "balance"


class OtherScope(Hypothesis):
    """All wrong gradients have the balance term of another scope, once, in the place of the right one."""

    name = "other_scope"
    quantities = frozenset({Quantity.GRADIENT})
    generalizes = ("detached", "one_factor", "loss_terms")

    def scopes(self, quantity: Quantity) -> tuple[Scope, ...]:
        """Return that all wrong gradients have this one cause."""
        del quantity
        return (Scope.TOGETHER,)

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Fit the errors on what the other term would add and the right one does not."""
        components = inputs.components() if inputs.components is not None else None
        if components is None or not knows(components, tensors) or _TERM not in components.terms:
            return self.untried(Reason.NO_SUCH_PARTS)
        if not all(bool(torch.isfinite(tensor.whole).all()) for tensor in tensors):
            return self.untried(Reason.NOT_COMPARABLE)
        for scope, vector in components.by_scope().items():
            names = [tensor.name for tensor in tensors]
            moved = {name: vector[name] - components.term(_TERM, name) for name in names}
            fit = fit_columns(tensors, [(WHOLE, lambda name, moved=moved: moved[name])])  # type: ignore[misc]
            # The part of a golden counts once by itself, so that what is added once is there twice.
            if fit is not None and fit.explains and is_same(fit.coefficients[0], 2.0):
                operation = Rescoped(term=_TERM, scope=scope)
                explanation = explain_by(Cause.FORWARD, operation, tensors, inputs, residual=fit.residual)
                outcome = self.accept(explanation, residual=fit.residual)
                return replace(outcome, num_coefficients=1)
        return self.refuse()


HYPOTHESIS = OtherScope()
