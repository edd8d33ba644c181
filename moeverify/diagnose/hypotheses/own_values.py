"""Hypothesis: some ranks started from values of their own, where the others have those of the seed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.operation import OwnValues


class OwnValuesHypothesis(Hypothesis):
    """The last thing that initial values can be: no part of them is known."""

    name = "own_values"
    quantities = frozenset({Quantity.INITIAL_VALUE})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """List the ranks whose values are not the golden's."""
        (tensor,) = tensors
        wrong = {
            shard.rank
            for shard in tensor.shards
            if shard.local is not None and not torch.equal(shard.values(), tensor.expected_of(shard))
        }
        operation = OwnValues(ranks=tuple(sorted(wrong)))
        return self.accept(explain_by(Cause.REPLICAS, operation, tensors, inputs))


HYPOTHESIS = OwnValuesHypothesis()
