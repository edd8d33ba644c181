"""Hypothesis: the weight, or the gradient of the previous step, was added to a gradient."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.explain.fitting.factors import find_factor, list_numbers
from moeverify.explain.fitting.fit import fit_columns
from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, Scope, explain_by
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.checks import Kind
from moeverify.results.explanation import Quantity
from moeverify.results.operation import Scaled
from moeverify.results.part import Contribution, Part

# Possible contents of a reused buffer, by the kind of the golden's value a step earlier.
_ADDED = {"gradient-of-step-before": Kind.GRADIENT, "weight": Kind.WEIGHT}


class AddedValues(Hypothesis):
    """The error is a multiple of another tensor of the parameter's shape: a buffer was not zeroed."""

    name = "added_values"
    quantities = frozenset({Quantity.GRADIENT})
    generalizes = ("one_factor",)

    own_scopes = (Scope.TOGETHER, Scope.FAMILY, Scope.ALONE)
    """All scopes: the more tensors one multiple explains, the less likely is chance."""

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome | None:
        """Fit the errors on each of the other tensors."""
        for added, kind in _ADDED.items():
            known = {tensor.name: inputs.golden(kind, tensor.name, 1) for tensor in tensors}
            part = Part.model_validate({"added": added})
            values = {name: value.double() for name, value in known.items() if value is not None}
            if len(values) < len(tensors):
                continue
            fit = fit_columns(tensors, [(part, lambda name, values=values: values[name])])  # type: ignore[misc]
            if fit is None:
                continue
            sources = inputs.sources_of(tensors)
            fit = fit.settle(list_numbers(sources)) if fit.explains else fit
            factor = find_factor(fit.coefficients[0], sources)
            contributions = (Contribution(part=part, factor=factor),)
            if fit.explains:
                operation = Scaled(contributions=contributions)
                explanation = explain_by(Cause.STALE, operation, tensors, inputs, residual=fit.residual)
                return Outcome(explanation, num_coefficients=1)
        return None


HYPOTHESIS = AddedValues()
