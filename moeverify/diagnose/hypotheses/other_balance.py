"""Hypothesis: the balance loss is made of other probabilities, or of another choice of experts, than it should."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from moeverify.diagnose.fit import fit_columns
from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, Scope, explain_by
from moeverify.diagnose.hypotheses.linear_fit import knows
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.checks import Kind
from moeverify.results.explanation import Quantity
from moeverify.results.factor import is_same
from moeverify.results.operation import Change, Redefined
from moeverify.results.part import WHOLE
from moeverify.results.trial import Reason
from moeverify.train.subject import Vector

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
        components = inputs.components() if inputs.components is not None else None
        if components is None or not knows(components, tensors) or _TERM not in components.terms:
            return self.untried(Reason.NO_SUCH_PARTS)
        if not all(bool(torch.isfinite(tensor.whole).all()) for tensor in tensors):
            return self.untried(Reason.NOT_COMPARABLE)
        right = {tensor.name: components.term(_TERM, tensor.name) for tensor in tensors}
        for num_changes in (1, 2):
            found = _find_variants(tensors, right, components.by_variant(num_changes))
            if found:
                residual = max(residual for _, residual in found)
                operation = Redefined(term=_TERM, variants=tuple(changes for changes, _ in found))
                # The subject is the loss, and what it explains are the gradients.
                explanation = explain_by(Cause.FORWARD, operation, losses, inputs, residual=residual)
                outcome = self.accept(explanation, residual=residual)
                return replace(outcome, num_coefficients=1)
        return self.refuse()


def _find_variants(
    tensors: Sequence[WrongTensor], right: Vector, variants: Iterable[tuple[tuple[Change, ...], Vector]]
) -> list[tuple[tuple[Change, ...], float]]:
    """Return the variants that explain all errors, with what they leave of these."""
    found = []
    for changes, vector in variants:
        moved = {name: vector[name] - right[name] for name in right}
        fit = fit_columns(tensors, [(WHOLE, lambda name, moved=moved: moved[name])])  # type: ignore[misc]
        # The part of a golden counts once by itself, so that what is added once is there twice.
        if fit is not None and fit.explains and is_same(fit.coefficients[0], 2.0):
            found.append((changes, fit.residual))
    return found


HYPOTHESIS = OtherBalance()
