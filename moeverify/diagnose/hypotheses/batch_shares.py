"""Hypothesis: the shares of the batch, of each data rank and micro-batch, are weighted incorrectly or missing."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.diagnose.components import Components
from moeverify.diagnose.fit import Column, Fit
from moeverify.diagnose.hypotheses.linear_fit import LinearFit, knows
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.factor import Source, is_same
from moeverify.results.operation import Scaled
from moeverify.results.part import Contribution, Part


class BatchShares(LinearFit):
    """Every share of the batch has a coefficient of its own, the same for all loss terms."""

    name = "batch_shares"
    generalizes = ("detached", "one_factor")
    cause = Cause.SHARE_WEIGHTS

    def columns(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> list[Column]:
        """Return the shares of the loss ranks and micro-batches."""
        components = inputs.components() if inputs.components is not None else None
        if components is None or not knows(components, tensors):
            return []
        return [
            (Part(tokens=cell.tokens), lambda name, number=number: components.share(number, name))  # type: ignore[misc]
            for number, cell in enumerate(components.cells)
        ]

    def sources(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> list[Source]:
        """Return none: a weight of one share that equals the size of an axis does so by chance."""
        return []

    def describe(self, wrong: tuple[Contribution, ...], fit: Fit, inputs: DiagnosisInputs) -> Scaled:
        """Return the shares that are off, and whether a mean of their means would weight them so."""
        assert inputs.components is not None
        return Scaled(contributions=wrong, local_means=count_local_means(fit, inputs.components()))


def count_local_means(fit: Fit, components: Components) -> int:
    """Return the number of shares if the lm weights are those of a mean of each share's own mean, else 0.

    The right loss of V valid tokens in n shares is sum_i(sum of share i) / V; the mean of means is
    1/n * sum_i(sum of share i) / V_i. So share i then has the weight V / (n * V_i).
    """
    weights = {
        part.tokens: value
        for part, value in zip(fit.parts, fit.coefficients, strict=True)
        if part.term in ("", "lm")
    }
    total, count = sum(components.num_valid), len(components.cells)
    hits = 0
    for cell, num_valid in zip(components.cells, components.num_valid, strict=True):
        value = weights.get(cell.tokens)
        if value is None:
            continue
        if not num_valid or not is_same(value, total / (count * num_valid)):
            return 0
        hits += 1
    return count if hits and any(not is_same(value, 1.0) for value in weights.values()) else 0


HYPOTHESIS = BatchShares()
