"""Hypothesis: a selection bias moves by the right counts, and by another rule than the sign of mean less count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moeverify.diagnose.families import module_of
from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.diagnose.inputs import INITIAL_VALUE, STEP_BEFORE, DiagnosisInputs
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.checks import Kind
from moeverify.results.explanation import Quantity
from moeverify.results.operation import BiasRule, MovedOtherwise
from moeverify.results.trial import Reason

_NAME = "selection_bias"

_ROUNDING = 1e-6
"""Of the largest bias: what float32 leaves of its sums."""


class BiasRuleHypothesis(Hypothesis):
    """The move of each expert is that of one other rule alone, and not that of the right one."""

    name = "bias_rule"
    quantities = frozenset({Quantity.BUFFER})

    def applies(self, tensor: WrongTensor, inputs: DiagnosisInputs) -> bool:
        """Return whether it is the bias of a router."""
        return super().applies(tensor, inputs) and tensor.name.endswith(_NAME)

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Move the bias of before by each rule."""
        (tensor,) = tensors
        times = inputs.earlier(tensor.key)
        before = times.get(STEP_BEFORE)
        before = times.get(INITIAL_VALUE) if before is None else before
        counts = inputs.golden(Kind.ROUTER_COUNTS, module_of(tensor.name), 0)
        if before is None or counts is None:
            return self.untried(Reason.NO_EARLIER_VALUE)
        right = tensor.expected - before.to(torch.float64)
        moved = tensor.whole - before.to(torch.float64)
        allowed = _ROUNDING * float(tensor.expected.abs().max() + right.abs().max())
        rules = _list_moves(counts.to(torch.float64), right, moved)
        if float(moved.abs().max()) <= allowed:
            return self.refuse()  # it has not moved at all
        fitting = [name for name, move in rules.items() if float((move - moved).abs().max()) <= allowed]
        if len(fitting) != 1:
            return self.refuse()
        operation = MovedOtherwise(rule=fitting[0])
        return self.accept(explain_by(Cause.STATE, operation, tensors, inputs))


def _list_moves(counts: Tensor, right: Tensor, moved: Tensor) -> Mapping[BiasRule, Tensor]:
    """Return the moves (E) by each rule, of counts (E); `right` has the rate, `moved` the scale of what has none."""
    rate = float(right.abs().max())
    signs, less = right / rate if rate else right, counts.mean() - counts
    scale = float(moved @ less) / max(float(less @ less), 1e-300)
    moves: dict[BiasRule, Tensor] = {
        "reversed": -right,
        # A share of the choices is below 1, and so below each count that is not zero.
        "frequency": rate * torch.where(counts > 0, -1.0, 1.0).to(torch.float64),
        "median": rate * torch.sign(counts.median() - counts),
        "unsigned": max(scale, 0.0) * less,
        "centred": rate * (signs - signs.mean()),
    }
    return {name: move for name, move in moves.items() if not torch.equal(move, right)}


HYPOTHESIS = BiasRuleHypothesis()
