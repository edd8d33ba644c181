"""Hypothesis: in the sum of squares of a norm some parameters count more often than once, or not at all.

The gradients are right, so the squares of all of them are known, and the squared norm is their sum. A norm that is
off by (k - 1) times the squares of one group of parameters has counted these k times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.norm_groups import find_miscounted_group
from moeverify.diagnose.replicas import sum_of_squares_explains
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.checks import Kind
from moeverify.results.explanation import Explanation, Quantity
from moeverify.results.factor import Factor, Product, is_same
from moeverify.results.observation import Observation, RankValues, ScalarValues
from moeverify.results.operation import Scaled, Unreduced
from moeverify.results.trial import Reason


class NormSquares(Hypothesis):
    """One group of parameters is counted k times, k a whole number; or the ranks' squares add up to the right one."""

    name = "norm_squares"
    quantities = frozenset({Quantity.GRADIENT_NORM})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Try the sum over every axis, then every group."""
        (tensor,) = tensors
        worst = tensor.worst_shard
        expected, actual = float(tensor.expected) ** 2, float(worst.values()) ** 2
        values = sorted({float(shard.values()) for shard in tensor.shards if shard.local is not None})
        seen: list[Observation] = [ScalarValues(expected=expected**0.5, actual=actual**0.5, rank=worst.rank)]
        if len(values) > 1:
            seen.append(RankValues(values=tuple(values)))
        unreduced = _find_axis(tensor, inputs)
        if unreduced is not None:
            return self.accept(explain_by(Cause.NORM, unreduced, tensors, inputs), *seen)
        squares = _measure_squares(inputs)
        total = sum(squares.values())
        if not squares or not is_same(total, expected):
            return self.untried(Reason.NO_SUCH_PARTS)
        explanation = _find_group(tensor, actual - expected, squares, inputs)
        return self.refuse(*seen) if explanation is None else self.accept(explanation, *seen)


def _find_axis(tensor: WrongTensor, inputs: DiagnosisInputs) -> Unreduced | None:
    """Return the axes over which the squares of what the ranks have add up to the expected square."""
    found = [axis for axis, groups in inputs.axes.groups.items() if sum_of_squares_explains(tensor, groups)]
    if not found:
        return None
    size = max(map(len, inputs.axes.groups[found[0]]))
    products = tuple(Product(times=(axis,)) for axis in found)
    return Unreduced(axes=products, num_replicas=size, factor=Factor(value=1.0))


def _measure_squares(inputs: DiagnosisInputs) -> dict[str, float]:
    """Return the squared norm of the golden's gradient of each parameter."""
    squares: dict[str, float] = {}
    for name in inputs.regions:
        gradient = inputs.golden(Kind.GRADIENT, name, 0)
        if gradient is not None:
            squares[name] = float(gradient.double().square().sum())
    return squares


def _find_group(
    tensor: WrongTensor, excess: float, squares: Mapping[str, float], inputs: DiagnosisInputs
) -> Explanation | None:
    parts = {name: {rank: region.key for rank, region in inputs.regions[name].items()} for name in squares}
    found = find_miscounted_group(excess, squares, parts, inputs.axes)
    return None if found is None else explain_by(Cause.NORM, Scaled(contributions=(found,)), [tensor], inputs)


HYPOTHESIS = NormSquares()
