"""Hypothesis: from some micro-batch on experts take the counts of rows of another micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.diagnose.hypotheses.returned_rows import find_other_rows
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.observation import WrongElements
from moeverify.results.trial import Reason


class StaleCounts(Hypothesis):
    """Counts are all that is wrong of the rows that experts return, and those of another micro-batch are they."""

    name = "stale_counts"
    quantities = frozenset({Quantity.OUTPUT})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Find the rows of which each token's output is the sum, where the first micro-batch is right."""
        (tensor,) = tensors
        origin = inputs.origin_of(tensor)
        if origin is None or not origin.first_micro_batch or tensor.precision != torch.float64:
            return self.untried(Reason.NOT_COMPARABLE)
        found = find_other_rows(tensor, inputs)
        if found is None or found.counts is None or found.counts.micro_batch is None:
            return self.refuse()
        seen = WrongElements(num_wrong=found.num_wrong, num_elements=found.num_rows)
        return self.accept(explain_by(Cause.STATE, found, tensors, inputs), seen)


HYPOTHESIS = StaleCounts()
