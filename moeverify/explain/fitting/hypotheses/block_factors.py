"""Hypothesis: slices along a dim (rows, columns or experts) have different factors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from moeverify.explain.fitting.factors import find_factor, list_numbers
from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.slices import make_block
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.factor import SAME
from moeverify.results.observation import FitResult
from moeverify.results.operation import Scaled
from moeverify.results.part import Contribution, Part
from moeverify.results.trial import Reason

_MOST_FACTORS = 3  # a separate factor for each slice would fit anything


class BlockFactors(Hypothesis):
    """Each slice along some dim is a multiple of the golden slice, with few different multiples.

    Examples are a reduction that is done twice for a part of a tensor, a scale for some experts, and rows
    that a load left zero.
    """

    name = "block_factors"
    quantities = frozenset({Quantity.GRADIENT, Quantity.MODULE_GRADIENT, Quantity.OUTPUT, Quantity.LOADED})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Measure the factor of every slice along every dim."""
        (tensor,) = tensors
        if tensor.expected.ndim < 2:
            return self.untried(Reason.NOT_COMPARABLE)
        for dim in reversed(range(tensor.expected.ndim)):
            sources = inputs.sources_of(tensors)
            measured = _measure_factors(tensor, dim)
            if measured is None:
                continue
            factors, residual = measured
            groups = _group_factors(factors, list_numbers(sources), tensor.exact)
            if not 2 <= len(groups) <= _MOST_FACTORS or any(len(found) < 2 for found in groups.values()):
                continue
            contributions = tuple(
                Contribution(
                    part=Part(block=make_block(tensor.name, dim, indices)), factor=find_factor(value, sources)
                )
                for value, indices in groups.items()
            )
            wrong = tuple(each for each in contributions if not each.is_right)
            explanation = explain_by(Cause.SCALE, Scaled(contributions=wrong), tensors, inputs)
            return self.accept(
                explanation,
                FitResult(contributions=contributions, residual=residual),
                contributions=contributions,
            )
        return self.refuse()


def _measure_factors(tensor: WrongTensor, dim: int) -> tuple[Tensor, float] | None:
    """Return the factor of each slice along a dim, and the relative residual of the whole tensor.

    The factor is NaN if both slices are zero. Return None if a slice is no multiple, or if slices are too
    few or too short.
    """
    wanted = tensor.expected.movedim(dim, 0).flatten(1)
    found = tensor.whole.movedim(dim, 0).flatten(1)
    squares = (wanted * wanted).sum(dim=1)
    if wanted.shape[0] < 4 or wanted.shape[1] < 2:  # a single number is a multiple of any other
        return None
    factors = (found * wanted).sum(dim=1) / squares
    left = (found - factors.nan_to_num().unsqueeze(1) * wanted).norm(dim=1)
    if not bool((left <= tensor.exact * torch.maximum(squares.sqrt(), found.norm(dim=1))).all()):
        return None
    return factors, float(left.norm() / found.norm().clamp(min=torch.finfo(found.dtype).tiny))


def _group_factors(factors: Tensor, numbers: Sequence[float], exact: float) -> dict[float, list[int]]:
    """Return the indices of the slices by factor, without slices that are zero in both tensors.

    A factor within `exact` of one of `numbers`, or of another slice's factor, is replaced by it.
    """
    groups: dict[float, list[int]] = {}
    allowed = max(SAME, exact)
    for index, value in enumerate(factors.tolist()):
        if math.isnan(value):  # zero in both
            continue
        near = (
            each
            for each in (*numbers, *groups)
            if abs(each - value) <= allowed * max(abs(each), abs(value), SAME)
        )
        groups.setdefault(next(near, value), []).append(index)
    return groups


HYPOTHESIS = BlockFactors()
