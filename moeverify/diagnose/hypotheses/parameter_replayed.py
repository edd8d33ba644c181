"""Hypothesis: over right inputs and gradients, a parameter has the gradient of a variant of its module's formula."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.diagnose.families import module_of
from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.replay.language import find_variant
from moeverify.diagnose.replay.parameters import as_module_tensor
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.observation import Replay
from moeverify.results.operation import Varied
from moeverify.results.trial import Reason

_MOST_FAILED = 6
"""Parameters without such a variant, after which no other is tried."""


class ParameterReplayed(Hypothesis):
    """Tried where all that modules put out and pass back is right: a parameter's own gradient alone is not."""

    name = "parameter_replayed"
    quantities = frozenset({Quantity.GRADIENT})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Search the variants of the gradient of one parameter."""
        (tensor,) = tensors
        if inputs.search is None or inputs.origins:
            return self.untried(Reason.NOT_COMPARABLE)
        failed = [
            found for found in inputs.searched_parameters.values() if found is not None and not found.variants
        ]
        if tensor.name not in inputs.searched_parameters and len(failed) >= _MOST_FAILED:
            return self.untried(Reason.NOT_COMPARABLE)
        named = inputs.parameter_formula(tensor.name)
        if named is None:
            return self.untried(Reason.NOT_COMPARABLE)
        if tensor.name not in inputs.searched_parameters:
            found = find_variant(named.formula, as_module_tensor(tensor), inputs.search.bound)
            inputs.searched_parameters[tensor.name] = found
        found = inputs.searched_parameters[tensor.name]
        if found is None:
            return self.untried(Reason.NOT_COMPARABLE)
        if not found.variants:
            return self.refuse(Replay(formula=named.name, num_tried=found.num_tried))
        seen = Replay(formula=named.name, num_tried=found.num_tried, residual=found.residual)
        operation = Varied(formula=named.name, variants=found.variants, ranks=found.ranks)
        subject = Subject(quantity=Quantity.GRADIENT, tensors=(tensor.name,), module=module_of(tensor.name))
        explanation = Explanation(
            cause=Cause.BACKWARD, subject=subject, operation=operation, residual=found.residual
        )
        return self.accept(explanation, seen)


HYPOTHESIS = ParameterReplayed()
