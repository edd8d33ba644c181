"""Base class of hypotheses that a wrong tensor is a wrong sum of right parts; subclasses define the parts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from moeverify.explain.fitting.components import Components
from moeverify.explain.fitting.factors import find_factor, list_numbers
from moeverify.explain.fitting.fit import Column, Fit, fit_columns
from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, Scope, explain_by
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.factor import Source
from moeverify.results.observation import FitResult
from moeverify.results.operation import Scaled
from moeverify.results.part import Contribution, Part

_FITTED = 1e-10  # of a coefficient: the rounding that a fit leaves


class LinearFit(Hypothesis):
    """Gradients are a sum of parts of their goldens, with one coefficient for each part.

    Test all gradients together first, then families, then single ones: a wrong combination cannot fit that
    many numbers by chance, and one common cause is simpler than several.
    """

    quantities = frozenset({Quantity.GRADIENT})
    cause: Cause

    own_scopes = (Scope.TOGETHER, Scope.FAMILY, Scope.ALONE)
    """All scopes."""

    @abstractmethod
    def columns(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> list[Column]:
        """Return the parts that may have wrong coefficients; empty if they are unknown."""

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome | None:
        """Fit the errors, and explain them if only rounding remains."""
        if not all(bool(torch.isfinite(tensor.whole).all()) for tensor in tensors):
            return None
        columns = self.columns(tensors, inputs)
        if not columns:
            return None
        fit = fit_columns(tensors, columns)
        if fit is None or not fit.explains:
            return None
        sources, counts = self.sources(tensors, inputs), self.counts(inputs)
        fit = fit.settle([*list_numbers(sources, counts), *self.numbers(inputs)])
        contributions = list_contributions(fit, sources, counts)
        # A factor of 1 + 1e-7 counts as right. If no other factor is off, it is the error.
        wrong = tuple(each for each in contributions if not each.is_right) or _list_off(contributions)
        operation = self.describe(wrong, fit, inputs)
        explanation = explain_by(self.cause, operation, tensors, inputs, residual=fit.residual)
        if _has_measured(operation) and any(tensor.precision.itemsize <= 2 for tensor in tensors):
            explanation = explanation.model_copy(update={"is_estimate": True})
        evidence = (FitResult(contributions=contributions, residual=fit.residual),)
        return Outcome(explanation, evidence, num_coefficients=len(fit.parts))

    def sources(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> list[Source]:
        """Return the integers of the run that may explain a wrong coefficient."""
        return inputs.sources_of(tensors)

    def counts(self, inputs: DiagnosisInputs) -> Sequence[Source]:
        """Return further integers of the recipe that may explain a coefficient; by default none."""
        del inputs
        return ()

    def numbers(self, inputs: DiagnosisInputs) -> Sequence[float]:
        """Return possible coefficients other than 0, 1 and products of these integers; by default none."""
        del inputs
        return ()

    def describe(self, wrong: tuple[Contribution, ...], fit: Fit, inputs: DiagnosisInputs) -> Scaled:
        """Return the operation for the parts that are off."""
        del fit, inputs
        return Scaled(contributions=wrong)


def list_contributions(
    fit: Fit, sources: Sequence[Source], counts: Sequence[Source] = ()
) -> tuple[Contribution, ...]:
    """Return each part with its coefficient and the possible sources of this factor."""
    return tuple(
        Contribution(part=part, factor=find_factor(value, sources, counts=counts))
        for part, value in zip(fit.parts, fit.coefficients, strict=True)
    )


def _has_measured(operation: Scaled) -> bool:
    """Return whether a factor equals nothing in the run: rounding may have changed it."""
    factors = (each.factor for each in operation.contributions)
    return not operation.local_means and any(not each.is_zero and not each.equals for each in factors)


def _list_off(contributions: tuple[Contribution, ...]) -> tuple[Contribution, ...]:
    """Return the parts whose factors are off by more than a float64 fit leaves, or else all parts."""
    off = (each for each in contributions if abs(each.factor.value - 1.0) > _FITTED)
    return tuple(off) or contributions


def knows(components: Components | None, tensors: Sequence[WrongTensor]) -> bool:
    """Return whether the parts of all of these gradients are known."""
    return components is not None and all(tensor.name in components.names for tensor in tensors)


def list_terms(components: Components) -> list[Column]:
    """Return the loss terms as parts."""
    return [
        (Part(term=term), lambda name, term=term: components.term(term, name))  # type: ignore[misc]
        for term in components.terms
    ]
