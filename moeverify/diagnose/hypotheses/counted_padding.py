"""Hypothesis: a router counts padding tokens among its choices."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.observation import ScalarValues
from moeverify.results.operation import Miscounted


class CountedPadding(Hypothesis):
    """It counts more choices than valid tokens make, and as many for each token of the batch with padding."""

    name = "counted_padding"
    quantities = frozenset({Quantity.ROUTING_COUNT})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Compare the sum of the counts, on the rank that is furthest off, with the tokens of the batch."""
        (tensor,) = tensors
        operation = count_choices(tensor)
        seen = ScalarValues(expected=operation.expected, actual=operation.actual, rank=operation.rank)
        is_more = operation.actual > operation.expected
        if not is_more or not inputs.num_tokens or operation.actual % inputs.num_tokens:
            return self.refuse(seen)
        return self.accept(explain_by(Cause.PADDING, operation, tensors, inputs), seen)


def count_choices(tensor: WrongTensor) -> Miscounted:
    """Return how many choices the rank that is furthest off counts, of those that the golden has there."""
    worst = tensor.worst_shard
    expected, actual = (float(each.sum()) for each in (tensor.expected_of(worst), worst.values()))
    return Miscounted(expected=expected, actual=actual, rank=worst.rank)


HYPOTHESIS = CountedPadding()
