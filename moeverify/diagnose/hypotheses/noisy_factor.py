"""Hypothesis: in 16 bits, everything is as many times the right one as an integer of the run, but for rounding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeverify.diagnose.counter_tests import count_right_alike, list_ranks_alone
from moeverify.diagnose.factors import find_factor
from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, Scope, explain_by
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.noisy_fit import (
    NoisyFactor,
    fit_noisy,
    is_far_from_one,
    is_left_by_rounding,
    join_factors,
)
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Explanation, Quantity
from moeverify.results.factor import Factor, Source
from moeverify.results.observation import FitResult
from moeverify.results.operation import Scaled
from moeverify.results.part import WHOLE, Contribution
from moeverify.results.trial import Reason


class NoisyFactorHypothesis(Hypothesis):
    """All have one factor that is an integer of the run, or one over it, within its standard error.

    What is left must look like rounding (`moeverify.diagnose.noisy_fit`). A number that no integer is, or that
    several are, stays without a cause: what a residual of some percent hides could be most of it. So does one that
    some ranks alone have, while replicas on others are right.
    """

    name = "noisy_factor"
    quantities = frozenset({Quantity.GRADIENT})
    generalizes = ("one_factor",)

    own_scopes = (Scope.TOGETHER, Scope.FAMILY, Scope.ALONE)
    """All of them: one factor for many tensors is no chance."""

    def applies(self, tensor: WrongTensor, inputs: DiagnosisInputs) -> bool:
        """Return whether the tensor was computed in 16 bits: with more, rounding leaves no standard error to ask."""
        return super().applies(tensor, inputs) and is_of_16_bits(tensor)

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Fit each tensor, join the factors, and compare the one that they have with the integers of the run."""
        factor = _fit_all(tensors)
        if factor is None:
            return self.refuse(reason=Reason.NO_MULTIPLE)
        measured = Contribution(part=WHOLE, factor=Factor(value=factor.value))
        seen = FitResult(contributions=(measured,), residual=factor.residual)
        found = name_factor(factor, inputs.sources_of(tensors))
        # What ranks reduce comes out alike on all of them: replicas that are right refute a factor of the run.
        if found is None or not is_far_from_one(factor) or list_ranks_alone(tensors):
            return self.refuse(seen, residual=factor.residual)
        operation = Scaled(contributions=(Contribution(part=WHOLE, factor=found),))
        explanation = explain_by(Cause.SCALE, operation, tensors, inputs, residual=factor.residual)
        others = tuple(count_right_alike(explanation, tensors, inputs))
        return self.accept(estimated(explanation), seen, *others, residual=factor.residual)


def estimated(explanation: Explanation) -> Explanation:
    """Return an explanation as what a fit to within rounding gives: in 16 bits outputs are not compared."""
    return explanation.model_copy(update={"is_estimate": True})


def is_of_16_bits(tensor: WrongTensor) -> bool:
    """Return whether a tensor was computed in 16 bits or fewer."""
    return tensor.precision.itemsize <= 2


def find_unit(tensor: WrongTensor) -> float:
    """Return the largest relative error of one rounding in the dtype in which a tensor was computed."""
    return torch.finfo(tensor.precision).eps / 2.0


def name_factor(factor: NoisyFactor, sources: Sequence[Source]) -> Factor | None:
    """Return the one source, or one over it, that a factor may be, with all sources of that size; None of several."""
    values = {value for source in sources for value in (float(source.size), 1.0 / source.size)}
    near = [value for value in values if factor.agrees(value)]
    return find_factor(near[0], sources) if len(near) == 1 else None


def _fit_all(tensors: Sequence[WrongTensor]) -> NoisyFactor | None:
    """Return the factor that all tensors have; None where one has another, or more is left than by rounding.

    Tensors of too few numbers to have a picture must agree as far as rounding lets them.
    """
    small: list[WrongTensor] = []
    factors: list[NoisyFactor] = []
    for tensor in tensors:
        unit = find_unit(tensor)
        factor = fit_noisy(tensor.whole, tensor.expected, unit)
        if factor is None:
            small.append(tensor)
        elif not factor.is_noise(unit):
            return None
        else:
            factors.append(factor)
    joined = join_factors(factors) if factors else None
    if joined is None or not joined.is_sharp:
        return None
    alike = all(
        is_left_by_rounding(each.whole, joined.value * each.expected, find_unit(each)) for each in small
    )
    return joined if alike else None


HYPOTHESIS = NoisyFactorHypothesis()
