"""Hypothesis: over right inputs and gradients, a parameter has the gradient of a variant of its module's formula."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch

from moeverify.diagnose.families import module_of
from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.replay.counted_tokens import join_numbers
from moeverify.diagnose.replay.language import RIGHT, Formula, Found, find_variant
from moeverify.diagnose.replay.parameters import as_module_tensor
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.change import Change
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
        is_factor = named is not None and is_multiple(tensor)
        if named is None or is_factor:
            return self.untried(Reason.SIMPLER_EXPLAINS if is_factor else Reason.NOT_COMPARABLE)
        if tensor.name not in inputs.searched_parameters:
            inputs.searched_parameters[tensor.name] = _search(named.formula, tensor, inputs)
        found = inputs.searched_parameters[tensor.name]
        if found is None:
            return self.untried(Reason.NOT_COMPARABLE)
        if not found.variants:
            return self.refuse(Replay(formula=named.name, num_tried=found.num_tried))
        seen = Replay(formula=named.name, num_tried=found.num_tried, residual=found.residual)
        variants = join_numbers(found.variants)
        operation = Varied(formula=named.name, variants=variants, ranks=found.ranks)
        subject = Subject(quantity=Quantity.GRADIENT, tensors=(tensor.name,), module=module_of(tensor.name))
        explanation = Explanation(
            cause=Cause.BACKWARD, subject=subject, operation=operation, residual=found.residual
        )
        return self.accept(explanation, seen)


def is_multiple(tensor: WrongTensor) -> bool:
    """Return whether what ranks have is the right gradient so many times, wherever it is wrong.

    A factor anywhere on the way of the gradient does that, so none of them is known to be the one.
    """
    wrong = [
        each for each in tensor.shards if tensor.error_of(each) > tensor.exact * float(tensor.expected.norm())
    ]
    if not wrong:
        return False
    expected = torch.cat([tensor.expected_of(each).flatten() for each in wrong])
    actual = torch.cat([each.values().flatten() for each in wrong])
    factor = torch.dot(expected, actual) / torch.dot(expected, expected)
    return float((actual - factor * expected).norm()) <= tensor.exact * float(actual.norm())


def _search(formula: Formula, tensor: WrongTensor, inputs: DiagnosisInputs) -> Found | None:
    """Return the variants of a parameter's gradient; what explains another parameter is asked first.

    A mistake of a kind of modules is in all of them, and each search costs as much as the first.
    """
    assert inputs.search is not None
    wrong, bound = as_module_tensor(tensor), inputs.search.bound
    # One device's gradients are rounded to the recipe's dtype, and the formula is evaluated in float64.
    right = RIGHT if tensor.precision == torch.float64 else tensor.exact
    others = [found.variants for found in inputs.searched_parameters.values() if found is not None]
    known = dict.fromkeys(
        changes for variants in others for changes in variants if _has_ways(formula, changes)
    )
    if known:
        few = copy(formula)
        few.ways = list(dict.fromkeys(changes[0] for changes in known))
        few.places = list(dict.fromkeys(changes[1] for changes in known if len(changes) > 1))
        few.fits = ()
        found = find_variant(few, wrong, bound, right)
        if found is not None and found.variants:
            return found
    return find_variant(formula, wrong, bound, right)


def _has_ways(formula: Formula, changes: Sequence[Change]) -> bool:
    return changes[0] in formula.ways and all(place in formula.places for place in changes[1:])


HYPOTHESIS = ParameterReplayed()
