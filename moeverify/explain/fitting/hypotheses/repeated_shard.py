"""Hypothesis: two ranks started with equal values in parts that should differ."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import RankShard, WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.operation import RepeatedShard


class RepeatedShardHypothesis(Hypothesis):
    """The shards of two regions are equal bit for bit, unlike the golden's.

    Both ranks drew the same random numbers. Constant shards, such as the ones of a norm, are skipped,
    because they were not drawn.
    """

    name = "repeated_shard"
    quantities = frozenset({Quantity.INITIAL_VALUE})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Compare the shards of different regions."""
        (tensor,) = tensors
        seen: dict[bytes, RankShard] = {}
        for shard in tensor.shards:
            values = shard.values()
            if shard.local is None or not values.numel() or bool((values == values.flatten()[:1]).all()):
                continue
            first = seen.setdefault(values.numpy().tobytes(), shard)
            if not torch.equal(tensor.expected_of(first), tensor.expected_of(shard)):
                operation = RepeatedShard(ranks=(first.rank, shard.rank))
                return self.accept(explain_by(Cause.DUPLICATE, operation, tensors, inputs))
        return self.refuse()


HYPOTHESIS = RepeatedShardHypothesis()
