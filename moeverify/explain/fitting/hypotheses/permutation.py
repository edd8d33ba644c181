"""Hypothesis: right values are in wrong places, permuted or copied from other parts of the same tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.slices import has_same_values, match_slices
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.operation import Moved

MOST_MOVES = 16  # kept as evidence; a permuted embedding has thousands
_LEAST_ELEMENTS = 8  # fewer elements have the same values in another order by chance


class Permutation(Hypothesis):
    """Every slice along some dim equals a golden slice, and some slices are in wrong places."""

    name = "permutation"
    quantities = frozenset(
        {
            Quantity.INITIAL_VALUE,
            Quantity.GRADIENT,
            Quantity.UPDATE,
            Quantity.OPTIMIZER_STATE,
            Quantity.LOADED,
            Quantity.TENSOR,
        }
    )

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome | None:
        """Match slices along every dim, then elements regardless of order."""
        (tensor,) = tensors
        actual, expected = tensor.whole, tensor.expected
        for dim in range(actual.ndim):
            source = match_slices(expected, actual, dim)
            moves = [(to, origin) for to, origin in enumerate(source or []) if to != origin]
            if source is None or not moves:
                continue
            copies = len(set(source)) < len(source)
            operation = Moved(
                unit="slice", dim=dim, moves=tuple(moves[:MOST_MOVES]), num_moves=len(moves), copies=copies
            )
            cause = Cause.DUPLICATE if copies else Cause.PERMUTATION
            return self.accept(explain_by(cause, operation, tensors, inputs))
        if (
            actual.numel() > _LEAST_ELEMENTS
            and not torch.equal(actual, expected)
            and has_same_values(expected, actual)
        ):
            return self.accept(explain_by(Cause.PERMUTATION, Moved(unit="element"), tensors, inputs))
        return None


HYPOTHESIS = Permutation()
