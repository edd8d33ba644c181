"""Hypothesis: the optimizer did not change the weight, although its gradient is right."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.checks import Kind
from moeverify.results.explanation import Quantity
from moeverify.results.observation import LargestValue
from moeverify.results.operation import Unmoved


class UnmovedHypothesis(Hypothesis):
    """The update is zero where the golden's is not."""

    name = "unmoved"
    quantities = frozenset({Quantity.UPDATE, Quantity.OPTIMIZER_STATE})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome | None:
        """Check the largest change."""
        (tensor,) = tensors
        expected, actual = (float(each.abs().max()) for each in (tensor.expected, tensor.whole))
        if expected == 0.0:
            return None
        seen = LargestValue(expected=expected, actual=actual)
        ranks = _find_unmoved(tensor)
        if actual != 0.0 and not ranks:
            return None
        is_everywhere = set(ranks) == {shard.rank for shard in tensor.shards if shard.region.numel}
        if not ranks or is_everywhere:
            return self.accept(explain_by(Cause.STALE, Unmoved(), tensors, inputs), seen)
        operation = Unmoved(ranks=ranks, unused=set(ranks) <= _find_unused(tensor, inputs))
        return self.accept(explain_by(Cause.STALE, operation, tensors, inputs), seen)


def _find_unmoved(tensor: WrongTensor) -> tuple[int, ...]:
    """Return the ranks whose part is wrongly zero; none if other parts are wrong, too."""
    unmoved: list[int] = []
    for shard in tensor.shards:
        expected, actual = tensor.expected_of(shard), shard.values()
        if tensor.error_of(shard) <= tensor.exact * float(tensor.expected.norm()):
            continue
        if bool(actual.any()) or not bool(expected.any()):
            return ()
        unmoved.append(shard.rank)
    return tuple(unmoved)


def _find_unused(tensor: WrongTensor, inputs: DiagnosisInputs) -> set[int]:
    """Return the ranks that hold a parameter but receive no gradient for it."""
    step, _, name = tensor.key
    gradient = inputs.tensors.get((step, Kind.GRADIENT, name))
    shards = gradient.shards if gradient is not None else ()
    return {shard.rank for shard in shards if shard.local is None}


HYPOTHESIS = UnmovedHypothesis()
