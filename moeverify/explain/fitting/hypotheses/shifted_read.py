"""Hypothesis: a rank read its part of a saved tensor from a wrong offset."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.operation import Shifted

_MOST_SHIFT = 4096  # elements; each shift costs a comparison of the whole shard


class ShiftedRead(Hypothesis):
    """A rank's values are its part of the tensor, shifted by some elements in either direction."""

    name = "shifted_read"
    quantities = frozenset({Quantity.LOADED})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome | None:
        """Test every offset on every wrong rank."""
        (tensor,) = tensors
        for shard in tensor.shards:
            expected, actual = (each.reshape(-1) for each in (tensor.expected_of(shard), shard.values()))
            if shard.local is None or torch.equal(expected, actual):
                continue
            offset = _find_offset(expected, actual)
            if offset:
                operation = Shifted(offset=offset, rank=shard.rank)
                return self.accept(explain_by(Cause.PERMUTATION, operation, tensors, inputs))
        return None


def _find_offset(expected: Tensor, actual: Tensor) -> int:
    """Return the offset at which `actual` begins in `expected`, negative if too early; 0 if not shifted."""
    for shift in range(1, min(_MOST_SHIFT, actual.numel() - 1)):
        rest = actual.numel() - shift
        if torch.equal(expected[shift:], actual[:rest]) and bool(actual[:rest].any()):
            return shift
        if torch.equal(expected[:rest], actual[shift:]) and bool(actual[shift:].any()):
            return -shift
    return 0


HYPOTHESIS = ShiftedRead()
