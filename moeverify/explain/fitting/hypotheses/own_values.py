"""Hypothesis: some ranks started with their own values, and the others with those of the seed."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.operation import OwnValues


class OwnValuesHypothesis(Hypothesis):
    """The last hypothesis for initial values: their origin is unknown."""

    name = "own_values"
    quantities = frozenset({Quantity.INITIAL_VALUE})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome | None:
        """List the ranks whose values differ from the golden."""
        (tensor,) = tensors
        wrong = {
            shard.rank
            for shard in tensor.shards
            if shard.local is not None and not torch.equal(shard.values(), tensor.expected_of(shard))
        }
        held = [shard for shard in tensor.shards if shard.local is not None and shard.region.numel]
        right = {(shard.region.key, shard.rank) for shard in held if shard.rank not in wrong}
        off = [(shard.region.key, shard.rank) for shard in held if shard.rank in wrong]
        groups = inputs.axes.groups_of(tensor.name)
        found = {
            axis: max(map(len, each)) for axis, each in groups.items() if _have_replicas(off, right, each)
        }
        # Larger groups contain those of the axis itself.
        axes = tuple(axis for axis, size in found.items() if size == min(found.values()))
        operation = OwnValues(ranks=tuple(sorted(wrong)), axes=axes)
        return self.accept(explain_by(Cause.REPLICAS, operation, tensors, inputs))


def _have_replicas(
    off: Sequence[tuple[str, int]], right: Collection[tuple[str, int]], groups: Sequence[Sequence[int]]
) -> bool:
    """Return whether each wrong (region, rank) has a right replica in its group."""
    group_of = {rank: group for group in groups for rank in group}
    return all(any((region, other) in right for other in group_of.get(rank, ())) for region, rank in off)


HYPOTHESIS = OwnValuesHypothesis()
