"""Hypothesis: initial values of several weights are so many times the right ones as a rule of their shapes gives."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, Scope, explain_by
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.scaled_by_shape import find_rules, measure_all
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.initial_values import ScaledByShape

_MOST_RULES = 2
"""More that give the same factors say nothing."""


class ScaledByShapeHypothesis(Hypothesis):
    """A deviation is made of other sizes of each weight: of its rows in place of its columns, say.

    It is about several weights of different shapes. Which of all wrong ones belong together is found before
    (`moeverify.diagnose.initial_values`).
    """

    name = "scaled_by_shape"
    quantities = frozenset({Quantity.INITIAL_VALUE})

    own_scopes = (Scope.TOGETHER,)
    """All that is wrong: one weight has one factor, and no rule."""

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Look for a rule that gives the factor of each tensor."""
        measured = measure_all(tensors)
        rules, given = find_rules(measured)
        powers = {rule.power for rule in rules}
        if len(powers) != 1 or len(given) < len(tensors) or len(rules) > _MOST_RULES:
            return self.refuse()
        values = [each.value for each in measured]
        operation = ScaledByShape(
            products=tuple(rule.product for rule in rules),
            power=rules[0].power,
            least=min(values),
            largest=max(values),
        )
        return self.accept(explain_by(Cause.SCALE, operation, tensors, inputs))


HYPOTHESIS = ScaledByShapeHypothesis()
