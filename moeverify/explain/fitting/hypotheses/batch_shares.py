"""Hypothesis: shares of the batch, by data rank and micro-batch, are missing or weighted incorrectly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from moeverify.explain.fitting.components import Components
from moeverify.explain.fitting.factors import find_factor
from moeverify.explain.fitting.fit import Column, Fit
from moeverify.explain.fitting.hypotheses.linear_fit import LinearFit, knows
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.factor import Source, is_same
from moeverify.results.operation import Scaled
from moeverify.results.part import Contribution, Part


class BatchShares(LinearFit):
    """One coefficient for each share of the batch, common to all loss terms."""

    name = "batch_shares"
    generalizes: ClassVar[tuple[str, ...]] = ("detached", "one_factor")
    cause = Cause.SHARE_WEIGHTS

    def columns(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> list[Column]:
        """Return the shares of the loss ranks and micro-batches."""
        components = inputs.components()
        if components is None or not knows(components, tensors):
            return []
        return [
            (Part(tokens=cell.tokens), lambda name, number=number: components.share(number, name))  # type: ignore[misc]
            for number, cell in enumerate(components.cells)
        ]

    def sources(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> list[Source]:
        """Return no sources: the weight of one share equals the size of an axis only by chance."""
        return []

    def numbers(self, inputs: DiagnosisInputs) -> Sequence[float]:
        """Return the weights that a mean of means would give."""
        components = inputs.components()
        return list_means(components) if components is not None else []

    def describe(self, wrong: tuple[Contribution, ...], fit: Fit, inputs: DiagnosisInputs) -> Scaled:
        """Return the wrong shares, and whether the weights of each wrong term are those of a mean of means.

        The right loss of V valid tokens in n shares is sum_i(sum of share i) / V. A mean of means is 1/n *
        sum_i(sum of share i) / V_i, so share i has the weight f * V / (n * V_i) with f = 1. Another common
        f means that the means are summed, or divided by another number.
        """
        components = inputs.components()
        assert components is not None  # the columns are its shares
        terms = {each.part.term for each in wrong}
        first, *others = [_measure_means(term, fit, components) for term in sorted(terms)] or [None]
        if first is None or any(each is None or not is_same(each, first) for each in others):
            return Scaled(contributions=wrong)
        factor = None if is_same(first, 1.0) else find_factor(first, inputs.axes.sources)
        return Scaled(contributions=wrong, local_means=len(components.cells), means_factor=factor)


def list_means(components: Components) -> list[float]:
    """Return the weight of each share in a mean of means: V / (n * V_i)."""
    total, count = sum(components.num_valid), len(components.cells)
    return [total / (count * num_valid) for num_valid in components.num_valid if num_valid]


def _measure_means(term: str, fit: Fit, components: Components) -> float | None:
    """Return f of a term.

    None if its weights are not those of a mean of means, or all shares have equal length.
    """
    weights = {
        part.tokens: value
        for part, value in zip(fit.parts, fit.coefficients, strict=True)
        if part.term == term
    }
    total, count = sum(components.num_valid), len(components.cells)
    found: list[float] = []
    for cell, num_valid in zip(components.cells, components.num_valid, strict=True):
        value = weights.get(cell.tokens)
        if value is None or not num_valid:
            continue
        found.append(value * count * num_valid / total)
    same = all(is_same(each, found[0]) for each in found)
    if not same or len(found) < 2 or len(set(components.num_valid)) < 2:
        return None
    return found[0]


HYPOTHESIS = BatchShares()
