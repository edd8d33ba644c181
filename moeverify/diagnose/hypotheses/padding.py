"""Hypothesis: padding tokens count in a loss term."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.diagnose.fit import Column
from moeverify.diagnose.hypotheses.linear_fit import LinearFit, knows, list_terms
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.part import Part, Tokens


class Padding(LinearFit):
    """The gradient has the loss terms, and of what padding would add to each a share that should be none."""

    name = "padding"
    generalizes = ("detached", "one_factor", "loss_terms")
    cause = Cause.PADDING

    def columns(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> list[Column]:
        """Return the loss terms, and what padding would add to each; none where the batch has no padding."""
        components = inputs.components() if inputs.components is not None else None
        if components is None or not components.padding or not knows(components, tensors):
            return []
        extra: list[Column] = [
            (
                Part(term=term, tokens=Tokens(padding=True)),
                lambda name, term=term: components.padding[term][name],  # type: ignore[misc]
            )
            for term in components.terms
            if term in components.padding
        ]
        return [*list_terms(components), *extra]


HYPOTHESIS = Padding()
