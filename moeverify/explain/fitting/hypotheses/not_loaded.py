"""Hypothesis: a load left a tensor, or its wrong part, unchanged."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.observation import KeptElements
from moeverify.results.operation import Replaced


class NotLoaded(Hypothesis):
    """Every wrong element is bit for bit the value before the load."""

    name = "not_loaded"
    quantities = frozenset({Quantity.LOADED})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome | None:
        """Count the wrong elements that did not change."""
        (tensor,) = tensors
        num_kept = num_wrong = num_elements = 0
        ranks = []
        for shard in tensor.shards:
            if shard.local is None or shard.before is None:
                continue
            # Compare in the tensor's own dtype, bit for bit.
            local, before = (part.reshape(shard.region.local_shape) for part in (shard.local, shard.before))
            wrong = shard.values() != tensor.expected_of(shard)
            num_wrong += int(wrong.sum())
            num_kept += int((wrong & (local == before)).sum())
            num_elements += local.numel()
            if wrong.any():
                ranks.append(shard.rank)
        seen = KeptElements(num_kept=num_kept, num_elements=num_elements)
        if not num_wrong or num_kept < num_wrong:
            return None
        operation = Replaced(by="value-before-load", ranks=tuple(sorted(set(ranks))))
        return self.accept(explain_by(Cause.NOT_LOADED, operation, tensors, inputs), seen)


HYPOTHESIS = NotLoaded()
