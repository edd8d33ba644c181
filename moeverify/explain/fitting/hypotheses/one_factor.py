"""Hypothesis: all values have the same factor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moeverify.cases.axes.groups import TOKENS, VALID_TOKENS
from moeverify.explain.fitting.counter_tests import count_right_alike, list_ranks_alone
from moeverify.explain.fitting.factors import find_factor
from moeverify.explain.fitting.fit import Column
from moeverify.explain.fitting.hypotheses.base import Outcome, Scope, explain_by
from moeverify.explain.fitting.hypotheses.linear_fit import LinearFit
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Explanation, Quantity
from moeverify.results.factor import Source
from moeverify.results.operation import Scaled
from moeverify.results.part import WHOLE, Contribution

# Quantities that ranks reduce: their factor may be the size of a group.
_REDUCED = (
    Quantity.GRADIENT,
    Quantity.OUTPUT,
    Quantity.MODULE_GRADIENT,
    Quantity.LOSS,
    Quantity.TENSOR,
)
_CAUSES = {
    # Gradients were compared before and are right: only the reported number is wrong.
    Quantity.LOSS: Cause.METRIC,
    Quantity.ROUTING_COUNT: Cause.METRIC,
}


class OneFactor(LinearFit):
    """All elements have one factor: a wrong divisor, a missing mean or a repeated sum."""

    name = "one_factor"
    quantities = frozenset(
        {
            Quantity.GRADIENT,
            Quantity.OUTPUT,
            Quantity.MODULE_GRADIENT,
            Quantity.LOSS,
            Quantity.ROUTING_COUNT,
            Quantity.UPDATE,
            Quantity.OPTIMIZER_STATE,
            Quantity.LOADED,
            Quantity.TENSOR,
        }
    )
    generalizes = ("detached",)
    cause = Cause.SCALE

    def scopes(self, quantity: Quantity) -> tuple[Scope, ...]:
        """Return all scopes for gradients; other tensors have different units and are tested alone."""
        return super().scopes(quantity) if quantity is Quantity.GRADIENT else (Scope.ALONE,)

    def columns(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> list[Column]:
        """Return the golden itself as the only part."""
        del inputs
        whole = {tensor.name: tensor.expected for tensor in tensors}
        return [(WHOLE, lambda name: whole[name])]

    def sources(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> list[Source]:
        """Return no sources for quantities that are not reduced over ranks, or if only some replicas are off.

        A count or an update equals an axis size by chance. Reduced values are the same on all replicas.
        """
        is_reduced = tensors[0].quantity in _REDUCED and not list_ranks_alone(tensors)
        return super().sources(tensors, inputs) if is_reduced else []

    def counts(self, inputs: DiagnosisInputs) -> Sequence[Source]:
        """Return the token counts of the batch: no axis has this size by chance."""
        return [each for each in inputs.axes.loss_counts if each.name in (TOKENS, VALID_TOKENS)]

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome | None:
        """Fit one coefficient; a scalar loss always has one."""
        first = tensors[0]
        if not any(bool(tensor.expected.any()) for tensor in tensors):
            return None
        if first.quantity is Quantity.LOADED and _is_constant(first):
            return None  # constants are multiples of each other
        if first.quantity is Quantity.LOSS and first.expected.numel() == 1:
            value = float(first.whole) / float(first.expected)
            factor = find_factor(value, self.sources(tensors, inputs), counts=inputs.axes.loss_counts)
            operation = Scaled(contributions=(Contribution(part=WHOLE, factor=factor),))
            return self.accept(explain_by(Cause.METRIC, operation, tensors, inputs))
        outcome = super().test(tensors, inputs)
        cause = _CAUSES.get(first.quantity)
        if outcome is None:
            return None
        seen = (*outcome.observations, *count_right_alike(outcome.explanation, tensors, inputs))
        explanation = _restrict(outcome.explanation, tensors)
        if cause is not None:
            explanation = explanation.model_copy(update={"cause": cause})
        return replace(outcome, observations=seen, explanation=explanation)


def _restrict(explanation: Explanation, tensors: Sequence[WrongTensor]) -> Explanation:
    """Return the explanation, limited to the ranks that have the factor."""
    ranks = list_ranks_alone(tensors)
    if not ranks or not isinstance(explanation.operation, Scaled):
        return explanation
    restricted = explanation.operation.model_copy(update={"ranks": ranks})
    return explanation.model_copy(update={"operation": restricted})


def _is_constant(tensor: WrongTensor) -> bool:
    return bool((tensor.expected == tensor.expected.reshape(-1)[0]).all())


HYPOTHESIS = OneFactor()
