"""Hypothesis: slices on several ranks, such as experts, are partial sums; those on one are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moeverify.explain.fitting.factors import find_factor
from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import RankShard, WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.observation import ReplicaSum
from moeverify.results.operation import Unreduced
from moeverify.results.trial import Reason


class HeldSum(Hypothesis):
    """A sum over the holders of each slice is missing; holders differ by slice and are no group of an axis.

    After the sum over its holders, each slice is the same multiple of the golden: 1, or an integer of the
    layout, such as a number of ranks by which no code divided.
    """

    name = "held_sum"
    quantities = frozenset({Quantity.GRADIENT})
    generalizes = ("one_factor", "replica_sum")

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Add the ranks' values, each in its region."""
        (tensor,) = tensors
        shards = [shard for shard in tensor.shards if shard.region.numel]
        if not shards or any(shard.local is None for shard in shards):
            return self.untried(Reason.NOT_HELD)
        total, holders = _add_up(tensor, shards)
        if int(holders.min()) != 1 or int(holders.max()) < 2:
            return self.untried(Reason.OTHER_REGIONS)
        if not _differ(tensor, shards, holders > 1):
            return self.untried(Reason.REPLICAS_EQUAL)
        wanted = tensor.expected
        square = float((wanted * wanted).sum())
        value = float((total * wanted).sum()) / square if square else 0.0
        residual = float((total - value * wanted).norm()) / (float(total.norm()) or 1.0)
        factor = find_factor(value, inputs.sources_of(tensors))
        if not residual <= tensor.exact or not (factor.is_one or factor.equals):
            return self.refuse(residual=residual)
        size = int(holders.max())
        operation = Unreduced(axes=(), num_replicas=size, factor=factor, is_over_holders=True)
        explanation = explain_by(Cause.MISSING_REDUCTION, operation, tensors, inputs, residual=residual)
        seen = ReplicaSum(axis="", num_replicas=size, factor=value, residual=residual)
        outcome = self.accept(explanation, seen, residual=residual)
        return replace(outcome, num_coefficients=1)


def _add_up(tensor: WrongTensor, shards: Sequence[RankShard]) -> tuple[Tensor, Tensor]:
    """Return the sum over ranks and the number of holders of each element, in the shape of the tensor."""
    flat, holders = tensor.expected.new_zeros(tensor.expected.numel()), torch.zeros(tensor.expected.numel())
    for shard in shards:
        index = shard.region.flat_index().flatten()
        flat.index_add_(0, index, shard.values().flatten())
        holders.index_add_(0, index, torch.ones(len(index)))
    return flat.view_as(tensor.expected), holders.view_as(tensor.expected)


def _differ(tensor: WrongTensor, shards: Sequence[RankShard], shared: Tensor) -> bool:
    """Return whether ranks differ in elements that several of them hold."""
    least, most = torch.full_like(tensor.expected, torch.inf), torch.full_like(tensor.expected, -torch.inf)
    for shard in shards:
        index = shard.region.flat_index().flatten()
        values = shard.values().flatten()
        least.view(-1)[index] = torch.minimum(least.view(-1)[index], values)
        most.view(-1)[index] = torch.maximum(most.view(-1)[index], values)
    return bool((least < most)[shared].any())


HYPOTHESIS = HeldSum()
