"""Hypothesis: the balance or the z loss is made of other parts than its formula has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moeverify.diagnose.factors import find_factor
from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, Scope, explain_by
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.replaced_term import find_parts, fit_multiple_of, fit_replaced
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.checks import Kind
from moeverify.results.explanation import Quantity
from moeverify.results.operation import Redefined
from moeverify.results.trial import Reason

_TERMS = ("balance", "z")


class OtherRouterLoss(Hypothesis):
    """All wrong gradients have one term of a variant of its formula in the place of the right one.

    The value of the term must be wrong too, as that of another formula is. Two changes are tried where none explains
    the gradients alone; then a multiple of one, where that is a number of the run.
    """

    name = "other_router_loss"
    quantities = frozenset({Quantity.GRADIENT})

    own_scopes = (Scope.TOGETHER,)
    """All gradients which are left have this one cause."""

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Fit the errors on what a variant would add and the right term does not."""
        wrong = [loss for loss in inputs.of_quantity(Quantity.LOSS) if loss.key[1] == Kind.LOSS]
        losses = [loss for loss in wrong if loss.name in _TERMS]
        if len(losses) != 1:
            return self.untried(Reason.LOSSES_MATCH) if not losses else self.refuse()
        term = losses[0].name
        parts = find_parts(term, tensors, inputs)
        if isinstance(parts, Reason):
            return self.untried(parts)
        components, right = parts
        for num_changes in (1, 2):
            found = [
                (changes, fit.residual)
                for changes, vector in components.by_variant(term, num_changes)
                if (fit := fit_replaced(tensors, right, vector)) is not None
            ]
            if found:
                operation = Redefined(term=term, variants=tuple(changes for changes, _ in found))
                return self._name(operation, losses, inputs, max(residual for _, residual in found))
        return self._find_multiple(term, tensors, losses, inputs)

    def _find_multiple(
        self,
        term: str,
        tensors: Sequence[WrongTensor],
        losses: Sequence[WrongTensor],
        inputs: DiagnosisInputs,
    ) -> Outcome:
        """Ask for a number of the run times one variant."""
        parts = find_parts(term, tensors, inputs)
        assert not isinstance(parts, Reason)
        components, right = parts
        for changes, vector in components.by_variant(term, 1):
            found = fit_multiple_of(tensors, right, vector)
            if found is None:
                continue
            fit, value = found
            factor = find_factor(value, inputs.axes.sources, counts=inputs.axes.loss_counts)
            if factor.equals:
                operation = Redefined(term=term, variants=(changes,), factor=factor)
                return self._name(operation, losses, inputs, fit.residual)
        return self.refuse()

    def _name(
        self, operation: Redefined, losses: Sequence[WrongTensor], inputs: DiagnosisInputs, residual: float
    ) -> Outcome:
        # The subject is the loss, and what it explains are the gradients.
        explanation = explain_by(Cause.FORWARD, operation, losses, inputs, residual=residual)
        return replace(self.accept(explanation, residual=residual), num_coefficients=1)


HYPOTHESIS = OtherRouterLoss()
