"""Hypothesis: nothing arrives; there is no gradient at all, or every rank has zeros."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.observation import LargestValue
from moeverify.results.operation import Zeroed


class Detached(Hypothesis):
    """All ranks have zeros, or none has a value, although the golden is not zero."""

    name = "detached"
    quantities = frozenset(
        {Quantity.GRADIENT, Quantity.MODULE_GRADIENT, Quantity.INITIAL_VALUE, Quantity.LOADED}
    )

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome | None:
        """Check the largest absolute value on any rank."""
        (tensor,) = tensors
        expected = float(tensor.expected.abs().max()) if tensor.expected.numel() else 0.0
        if expected == 0.0:
            return None
        held = [shard for shard in tensor.shards if shard.local is not None and shard.region.numel]
        # Require zeros on all ranks: if ranks differ they may have partial sums, and zeros on one are no
        # cause.
        actual = max((float(shard.values().abs().max()) for shard in held), default=0.0)
        absent = tuple(shard.rank for shard in tensor.shards if shard.local is None)
        seen = LargestValue(expected=expected, actual=actual, absent_on=absent)
        is_single_number = tensor.quantity is Quantity.LOADED and tensor.expected.numel() == 1
        if actual != 0.0 or is_single_number:
            return None
        operation = Zeroed(absent=bool(tensor.shards) and len(absent) == len(tensor.shards))
        explanation = explain_by(Cause.DETACHED, operation, tensors, inputs)
        if tensor.quantity is Quantity.GRADIENT and inputs.search is None:
            # Modules outside of the graph have no gradient either. Without module readings, report an
            # estimate.
            explanation = explanation.model_copy(update={"is_estimate": True})
        return self.accept(explanation, seen)


HYPOTHESIS = Detached()
