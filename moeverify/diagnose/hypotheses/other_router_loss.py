"""Hypothesis: the balance loss is made of other probabilities, or of another choice of experts, than it should."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, Scope, explain_by
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.replaced_term import find_parts, fit_replaced
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.checks import Kind
from moeverify.results.explanation import Quantity
from moeverify.results.operation import Redefined
from moeverify.results.trial import Reason

_TERM = "balance"


class OtherBalance(Hypothesis):
    """All wrong gradients have the balance term of a variant of its formula, once, in the place of the right one.

    The value of the term must be wrong too, as that of another formula is. Two changes are tried where none explains
    the gradients alone.
    """

    name = "other_balance"
    quantities = frozenset({Quantity.GRADIENT})

    def scopes(self, quantity: Quantity) -> tuple[Scope, ...]:
        """Return that all gradients which are left have this one cause."""
        del quantity
        return (Scope.TOGETHER,)

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Fit the errors on what a variant would add and the right term does not."""
        losses = [
            loss
            for loss in inputs.of_quantity(Quantity.LOSS)
            if loss.key[1] == Kind.LOSS and loss.name == _TERM
        ]
        if not losses:
            return self.untried(Reason.LOSSES_MATCH)
        parts = find_parts(_TERM, tensors, inputs)
        if isinstance(parts, Reason):
            return self.untried(parts)
        components, right = parts
        for num_changes in (1, 2):
            found = [
                (changes, fit.residual)
                for changes, vector in components.by_variant(num_changes)
                if (fit := fit_replaced(tensors, right, vector)) is not None
            ]
            if found:
                residual = max(residual for _, residual in found)
                operation = Redefined(term=_TERM, variants=tuple(changes for changes, _ in found))
                # The subject is the loss, and what it explains are the gradients.
                explanation = explain_by(Cause.FORWARD, operation, losses, inputs, residual=residual)
                outcome = self.accept(explanation, residual=residual)
                return replace(outcome, num_coefficients=1)
        return self.refuse()


HYPOTHESIS = OtherBalance()
