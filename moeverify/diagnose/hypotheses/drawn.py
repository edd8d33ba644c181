"""Hypothesis: initial values are drawn by another rule, or by another seed, than the seed and the names give."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeverify.diagnose.draws import find_draws
from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, Scope, explain_by
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.spreads import find_spreads
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.checks import Kind
from moeverify.results.explanation import Quantity
from moeverify.results.initial_values import Drawn


class DrawnHypothesis(Hypothesis):
    """All values of some weights are of one distribution, whose size each weight's shape, or the model, gives.

    Ranks must agree: where some have values of their own, it is these that differ.
    """

    name = "drawn"
    quantities = frozenset({Quantity.INITIAL_VALUE})

    own_scopes = (Scope.TOGETHER,)
    """All that is wrong: which of these belong together is found before."""

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Look for a distribution that all of them have."""
        if not all(map(is_common, tensors)):
            return self.refuse()
        found = group_draws(tensors, inputs)
        if len(found) != 1 or len(found[0][0]) < len(tensors):
            return self.refuse()
        return self.accept(explain_by(Cause.INITIALIZATION, found[0][1], tensors, inputs))


def group_draws(
    tensors: Sequence[WrongTensor], inputs: DiagnosisInputs
) -> list[tuple[list[WrongTensor], Drawn]]:
    """Return groups of tensors with the distributions of their values, those that are sure.

    Of all others the means and deviations, where these are not the right ones.
    """
    shapes = {name: next(iter(held.values())).shape for name, held in inputs.regions.items() if held}
    drawn = find_draws(tensors, inputs.named.sizes, shapes)
    told = {id(tensor) for members, _ in drawn for tensor in members}
    left = [tensor for tensor in tensors if id(tensor) not in told]
    found = [(members, Drawn(draws=draws)) for members, draws in drawn]
    if not left:
        return found
    initial = {name: inputs.golden(Kind.INITIAL_WEIGHT, name, 0) for name in inputs.regions}
    right = {name: value for name, value in initial.items() if value is not None}
    return found + [(members, Drawn(spread=spread)) for members, spread in find_spreads(left, right)]


def is_common(tensor: WrongTensor) -> bool:
    """Return whether all ranks have the same values of a tensor, and none of them has the right ones."""
    held = [shard for shard in tensor.shards if shard.region.numel]
    return all(
        shard.local is not None
        and shard.local.numel() == shard.region.numel
        and torch.equal(shard.values(), shard.region.take(tensor.whole).reshape(shard.region.local_shape))
        for shard in held
    )


HYPOTHESIS = DrawnHypothesis()
