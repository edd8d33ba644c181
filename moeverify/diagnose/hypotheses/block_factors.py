"""Hypothesis: slices along a dim have factors of their own: rows, columns or experts are scaled otherwise."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from moeverify.diagnose.factors import find_factor
from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.slices import make_block
from moeverify.diagnose.wrong_tensor import EXACT, WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.factor import is_same
from moeverify.results.observation import FitResult
from moeverify.results.operation import Scaled
from moeverify.results.part import Contribution, Part
from moeverify.results.trial import Reason

_MOST_FACTORS = 3  # of as many slices as there are, each with a number of its own, anything is made


class BlockFactors(Hypothesis):
    """Each slice along some dim is a multiple of the expected one, and there are few different multiples.

    A reduction that is done twice for a part of a tensor, a scale for some experts alone, rows that a load left zero.
    """

    name = "block_factors"
    quantities = frozenset({Quantity.GRADIENT, Quantity.MODULE_GRADIENT, Quantity.OUTPUT, Quantity.LOADED})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Measure the factor of every slice along every dim."""
        (tensor,) = tensors
        if tensor.expected.ndim < 2:
            return self.untried(Reason.NOT_COMPARABLE)
        for dim in reversed(range(tensor.expected.ndim)):
            measured = _measure_factors(tensor.expected, tensor.whole, dim)
            groups = _group_factors(measured) if measured is not None else {}
            if not 2 <= len(groups) <= _MOST_FACTORS or any(len(found) < 2 for found in groups.values()):
                continue
            sources = inputs.sources_of(tensors)
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
                FitResult(contributions=contributions, residual=EXACT),
                contributions=contributions,
            )
        return self.refuse()


def _measure_factors(expected: Tensor, actual: Tensor, dim: int) -> Tensor | None:
    """Return k of each slice along a dim, not a number where it is zero in both; None where one is no multiple."""
    wanted = expected.movedim(dim, 0).flatten(1)
    found = actual.movedim(dim, 0).flatten(1)
    squares = (wanted * wanted).sum(dim=1)
    if wanted.shape[0] < 4 or wanted.shape[1] < 2:  # one number is a multiple of any other
        return None
    factors = (found * wanted).sum(dim=1) / squares
    left = (found - factors.nan_to_num().unsqueeze(1) * wanted).norm(dim=1)
    if not bool((left <= EXACT * torch.maximum(squares.sqrt(), found.norm(dim=1))).all()):
        return None
    return factors


def _group_factors(factors: Tensor) -> dict[float, list[int]]:
    """Return the indices by their factor; slices that are zero have none."""
    groups: dict[float, list[int]] = {}
    for index, value in enumerate(factors.tolist()):
        if math.isnan(value):  # zero in both
            continue
        known = next((each for each in groups if is_same(each, value)), value)
        groups.setdefault(known, []).append(index)
    return groups


HYPOTHESIS = BlockFactors()
