"""Hypothesis: the norm is right, and the coefficient of the clip is made of it by another formula."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from moeverify.checks.clip import TOTAL
from moeverify.diagnose.factors import find_factor
from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.wrong_tensor import EXACT, WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.checks import Kind
from moeverify.results.explanation import Quantity
from moeverify.results.factor import Factor
from moeverify.results.formula_names import ClipFormulaName
from moeverify.results.observation import ScalarValues
from moeverify.results.operation import Reclipped
from moeverify.results.trial import Reason
from moeverify.train.clipping import GUARD

_GUARD_IS_KNOWN = 1e-4
"""How far a count of the guard may be from a whole number. A norm is off by 1e-14 of itself at most: where that is
more than a share of this of the guard, the guard cannot be read from the coefficient."""
_NORM_ERROR = 1e-14


class ClipFormula(Hypothesis):
    """The coefficient is min(1, limit / (norm + guard)) with another guard, without its bound, limit or root.

    In float64 alone: the guard is 1e-6, which is the rounding of a narrower norm.
    """

    name = "clip_formula"
    quantities = frozenset({Quantity.CLIP_COEFFICIENT})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Compute the other formulas from the golden's norm."""
        (tensor,) = tensors
        total = inputs.golden(Kind.GRADIENT_NORM, TOTAL, 0)
        if total is None or inputs.max_norm is None or tensor.precision != torch.float64:
            return self.untried(Reason.NOT_COMPARABLE)
        worst = tensor.worst_shard
        norm, limit, actual = float(total), inputs.max_norm, float(worst.values())
        seen = ScalarValues(expected=float(tensor.expected), actual=actual, rank=worst.rank)
        operation = (
            _find_formula(actual, norm, limit)
            or _find_guard(actual, norm, limit, inputs)
            or _find_limit(actual, norm, limit, inputs)
        )
        if operation is None:
            return self.refuse(seen)
        return self.accept(explain_by(Cause.NORM, operation, tensors, inputs), seen)


def _find_formula(actual: float, norm: float, limit: float) -> Reclipped | None:
    """Return which other formula gives the coefficient to rounding."""
    right = limit / (norm + GUARD)
    formulas: Mapping[ClipFormulaName, float] = {
        "unbounded": right,
        "without-limit": 1.0 / (norm + GUARD),
        "squared": right * right,
        "of-squared-norm": limit / (norm * norm + GUARD),
        "root": math.sqrt(right),
        "inverse": 1.0 / right,
        "soft": limit / (norm + limit),
        "limit-squared": limit * limit / (norm + GUARD),
        "of-root-norm": limit / (math.sqrt(norm) + GUARD),
    }
    wrong = min(1.0, right)
    for way, value in formulas.items():
        for bounded in (value, min(1.0, value)):
            is_it = abs(bounded - actual) <= EXACT * abs(actual)
            if is_it and abs(bounded - wrong) > EXACT * wrong and bounded != 1.0:
                return Reclipped(way=way)
    return None


def _find_guard(actual: float, norm: float, limit: float, inputs: DiagnosisInputs) -> Reclipped | None:
    """Return how often the guard is added, where that is a number of the run, or not at all."""
    if not 0.0 < actual < 1.0 or norm * _NORM_ERROR > _GUARD_IS_KNOWN * GUARD:
        return None
    count = (limit / actual - norm) / GUARD
    whole = round(count)
    if abs(count - whole) > _GUARD_IS_KNOWN or whole < 0 or whole == 1:
        return None
    factor = find_factor(float(whole), inputs.axes.sources) if whole else Factor(value=0.0)
    return Reclipped(way="guard", factor=factor) if factor.is_zero or factor.equals else None


def _find_limit(actual: float, norm: float, limit: float, inputs: DiagnosisInputs) -> Reclipped | None:
    """Return the number of the run that multiplies the limit; None if there is none."""
    if not 0.0 < actual < 1.0:
        return None
    factor = find_factor(actual * (norm + GUARD) / limit, inputs.axes.sources)
    return Reclipped(way="limit", factor=factor) if factor.equals else None


HYPOTHESIS = ClipFormula()
