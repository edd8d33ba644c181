"""Hypothesis: the terms of the loss have factors of their own, or one is missing."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.diagnose.fit import Column
from moeverify.diagnose.hypotheses.linear_fit import LinearFit, knows, list_terms
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.factor import Source


class LossTerms(LinearFit):
    """The gradient has each loss term (lm, balance, z) with a coefficient of its own."""

    name = "loss_terms"
    generalizes = ("detached", "one_factor")
    cause = Cause.TERM_SCALE

    def columns(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> list[Column]:
        """Return the loss terms."""
        components = inputs.components() if inputs.components is not None else None
        return list_terms(components) if components is not None and knows(components, tensors) else []

    def counts(self, inputs: DiagnosisInputs) -> Sequence[Source]:
        """Return what a term may be divided by besides the ranks."""
        return inputs.axes.loss_counts


HYPOTHESIS = LossTerms()
