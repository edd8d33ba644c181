"""Hypothesis: loss terms of some shares of the batch are missing or weighted incorrectly."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.explain.fitting.fit import Column
from moeverify.explain.fitting.hypotheses.batch_shares import BatchShares
from moeverify.explain.fitting.hypotheses.linear_fit import knows
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.part import Part


class ShareTerms(BatchShares):
    """One coefficient for each loss term of each share of the batch."""

    name = "share_terms"
    generalizes = ("detached", "one_factor", "loss_terms", "batch_shares")

    def columns(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> list[Column]:
        """Return the parts by term and share."""
        components = inputs.components()
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


HYPOTHESIS = ShareTerms()
