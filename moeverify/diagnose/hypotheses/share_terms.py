"""Hypothesis: the loss terms of each share of the batch are weighted incorrectly or missing."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.diagnose.fit import Column, Fit
from moeverify.diagnose.hypotheses.batch_shares import describe_means, list_means
from moeverify.diagnose.hypotheses.linear_fit import LinearFit, knows
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.factor import Source
from moeverify.results.operation import Scaled
from moeverify.results.part import Contribution, Part


class ShareTerms(LinearFit):
    """Every loss term of every share of the batch has a coefficient of its own."""

    name = "share_terms"
    generalizes = ("detached", "one_factor", "loss_terms", "batch_shares")
    cause = Cause.SHARE_WEIGHTS

    def columns(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> list[Column]:
        """Return the parts by term and share."""
        components = inputs.components() if inputs.components is not None else None
        if components is None or not knows(components, tensors):
            return []
        return [
            (
                Part(term=term, tokens=cell.tokens),
                lambda name, term=term, number=number: components.parts[term][number][name],  # type: ignore[misc]
            )
            for term in components.terms
            for number, cell in enumerate(components.cells)
        ]

    def sources(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> list[Source]:
        """Return none: a weight of one share that equals the size of an axis does so by chance."""
        return []

    def numbers(self, inputs: DiagnosisInputs) -> Sequence[float]:
        """Return the weights that a mean of means would give."""
        assert inputs.components is not None
        return list_means(inputs.components())

    def describe(self, wrong: tuple[Contribution, ...], fit: Fit, inputs: DiagnosisInputs) -> Scaled:
        """Return the parts that are off, and whether a mean of means would weight those of lm so."""
        assert inputs.components is not None
        return describe_means(wrong, fit, inputs, inputs.components())


HYPOTHESIS = ShareTerms()
