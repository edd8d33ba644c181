"""Last hypothesis: a result is wrong although its inputs are right, for an unknown reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from moeverify.cases.axes.groups import TOKENS, VALID_TOKENS
from moeverify.explain.fitting.families import module_of
from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.factor import is_same
from moeverify.results.observation import Observation, ScalarValues, WrongElements
from moeverify.results.operation import Altered, Miscounted, Operation

_CAUSES: Mapping[Quantity, Cause] = {
    Quantity.OUTPUT: Cause.FORWARD,
    Quantity.MODULE_GRADIENT: Cause.BACKWARD,
    Quantity.EXPERT_CHOICE: Cause.ROUTING,
    Quantity.ROUTING_WEIGHT: Cause.FORWARD,
    Quantity.ROUTING_COUNT: Cause.STATE,
    Quantity.LOSS: Cause.METRIC,
    Quantity.BUFFER: Cause.STATE,
    Quantity.LOADED: Cause.STATE,
}

# A router's own computation is only blamed if its inputs are known to be right.
_BEHIND_INPUTS = (Quantity.EXPERT_CHOICE, Quantity.ROUTING_WEIGHT)


class AlteredHypothesis(Hypothesis):
    """Names a result whose place is known: the inputs match, and the result does not.

    Gradients and updates are excluded: they are not tied to a place, and stay without a cause.
    """

    name = "altered"
    quantities = frozenset(_CAUSES)

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome | None:
        """Accept without a test, with the observed error; leave no trial."""
        (tensor,) = tensors
        if tensor.quantity in _BEHIND_INPUTS and inputs.search is None:
            # In bfloat16, modules are not compared: the router's input may have been wrong.
            return None
        cause = _CAUSES[tensor.quantity]
        if tensor.quantity in _BEHIND_INPUTS and _puts_out_right(tensor, inputs):
            cause = Cause.METRIC
        origin = inputs.origin_of(tensor)
        is_seen = origin is None or origin.inputs_seen
        is_no_number = origin is not None and not _is_finite(tensor)
        first = origin.first_micro_batch if origin is not None and tensor.quantity is Quantity.OUTPUT else 0
        operation: Operation = Altered(
            first_micro_batch=first, inputs_seen=is_seen, is_no_number=is_no_number
        )
        seen: list[Observation] = []
        if tensor.quantity is Quantity.ROUTING_COUNT:
            operation = _count_choices(tensor, inputs)
            cause = Cause.PADDING if operation.counts_padding else cause
        elif first:
            cause = Cause.STATE
        elif tensor.quantity is Quantity.OUTPUT and chooses_otherwise(tensor, inputs):
            cause = Cause.ROUTING
        elif tensor.expected.numel() == 1:
            worst = tensor.worst_shard
            expected, actual = float(tensor.expected), float(worst.values())
            seen.append(ScalarValues(expected=expected, actual=actual, rank=worst.rank))
        elif tensor.quantity is Quantity.BUFFER:
            num_wrong = int((tensor.whole != tensor.expected).sum())
            seen.append(WrongElements(num_wrong=num_wrong, num_elements=tensor.expected.numel()))
        explanation = explain_by(cause, operation, tensors, inputs)
        return Outcome(explanation, tuple(seen))


def _count_choices(tensor: WrongTensor, inputs: DiagnosisInputs) -> Miscounted:
    """Return the expected and actual sum of counts on the worst rank."""
    sizes = {each.name: each.size for each in inputs.axes.loss_counts}
    scale = sizes.get(TOKENS, 1) / sizes.get(VALID_TOKENS, 1)
    worst = tensor.worst_shard
    expected, actual = (float(each.sum()) for each in (tensor.expected_of(worst), worst.values()))
    is_all = scale > 1.0 and is_same(actual, expected * scale)
    return Miscounted(expected=expected, actual=actual, rank=worst.rank, counts_padding=is_all)


def _is_finite(tensor: WrongTensor) -> bool:
    held = [shard.values() for shard in tensor.shards if shard.local is not None]
    return all(bool(torch.isfinite(values).all()) for values in held)


def _puts_out_right(tensor: WrongTensor, inputs: DiagnosisInputs) -> bool:
    """Return whether the block of a router has the right output: then only the reported value is wrong."""
    block = module_of(tensor.name)
    return inputs.search is not None and block in inputs.search.matched


def chooses_otherwise(tensor: WrongTensor, inputs: DiagnosisInputs) -> bool:
    """Return whether the module is a router whose chosen experts are wrong."""
    origin = inputs.origin_of(tensor)
    chosen = {each.name for each in inputs.of_quantity(Quantity.EXPERT_CHOICE)}
    return origin is not None and origin.culprit in chosen


HYPOTHESIS = AlteredHypothesis()
