"""Hypothesis: a router counts padding tokens among its choices."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.observation import ScalarValues
from moeverify.results.operation import Miscounted


class CountedPadding(Hypothesis):
    """The sum of counts is too large, and divisible by the number of tokens of the batch with padding."""

    name = "counted_padding"
    quantities = frozenset({Quantity.ROUTING_COUNT})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Compare the sum of the counts on the worst rank with the tokens of the batch."""
        (tensor,) = tensors
        operation = count_choices(tensor)
        seen = ScalarValues(expected=operation.expected, actual=operation.actual, rank=operation.rank)
        is_more = operation.actual > operation.expected
        if not is_more or not inputs.num_tokens or operation.actual % inputs.num_tokens:
            return self.refuse(seen)
        return self.accept(explain_by(Cause.PADDING, operation, tensors, inputs), seen)


def count_choices(tensor: WrongTensor) -> Miscounted:
    """Return the expected and actual sum of counts on the worst rank."""
    worst = tensor.worst_shard
    expected, actual = (float(each.sum()) for each in (tensor.expected_of(worst), worst.values()))
    return Miscounted(expected=expected, actual=actual, rank=worst.rank)


HYPOTHESIS = CountedPadding()
