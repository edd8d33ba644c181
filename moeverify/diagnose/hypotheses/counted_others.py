"""Hypothesis: a router counts the choices of other tokens, as many as it should: by a mask that is shifted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.diagnose.hypotheses.counted_padding import count_choices
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.checks import Kind
from moeverify.results.explanation import Quantity
from moeverify.results.trial import Reason


class CountedOthers(Hypothesis):
    """The right choices, counted where the mask of padding (B, S) of tokens some positions before says so.

    A mask of local positions, or that of another rank's part of them. One shift alone must give all counts.
    """

    name = "counted_others"
    quantities = frozenset({Quantity.ROUTING_COUNT})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Count by every mask that is shifted along the row."""
        (tensor,) = tensors
        ids = inputs.golden(Kind.ROUTER_IDS, tensor.name, 0)
        valid, worst = inputs.valid, tensor.worst_shard
        if ids is None or valid is None or ids.shape[:2] != valid.shape or not worst.region.is_whole:
            return self.untried(Reason.NOT_HELD)
        actual = worst.values()

        def count(shift: int) -> torch.Tensor:
            chosen = ids[valid.roll(shift, 1)].flatten().long()
            return torch.bincount(chosen, minlength=len(actual)).to(torch.float64)

        if not torch.equal(count(0), tensor.expected_of(worst)):
            return self.untried(Reason.NOT_COMPARABLE)
        fitting = [shift for shift in range(1, valid.shape[1]) if torch.equal(count(shift), actual)]
        if len(fitting) != 1:
            return self.refuse()
        operation = count_choices(tensor).model_copy(update={"shift": fitting[0]})
        return self.accept(explain_by(Cause.STATE, operation, tensors, inputs))


HYPOTHESIS = CountedOthers()
