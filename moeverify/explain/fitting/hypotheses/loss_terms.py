"""Hypothesis: loss terms have different factors, or one is missing."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.explain.fitting.fit import Column
from moeverify.explain.fitting.hypotheses.linear_fit import LinearFit, knows, list_terms
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.factor import Source


class LossTerms(LinearFit):
    """One coefficient for each loss term (lm, balance, z)."""

    name = "loss_terms"
    generalizes = ("detached", "one_factor")
    cause = Cause.TERM_SCALE

    def columns(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> list[Column]:
        """Return the loss terms."""
        components = inputs.components()
        return list_terms(components) if components is not None and knows(components, tensors) else []

    def counts(self, inputs: DiagnosisInputs) -> Sequence[Source]:
        """Return possible divisors of a loss term other than ranks."""
        return inputs.axes.loss_counts


HYPOTHESIS = LossTerms()
