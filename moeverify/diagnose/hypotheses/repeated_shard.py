"""Hypothesis: two ranks started with the same values in parts that should differ."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.operation import RepeatedShard


class RepeatedShardHypothesis(Hypothesis):
    """The shards of two regions are equal bit for bit: each rank drew the same random numbers."""

    name = "repeated_shard"
    quantities = frozenset({Quantity.INITIAL_VALUE})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Compare the shards of different regions."""
        (tensor,) = tensors
        seen: dict[bytes, tuple[int, str]] = {}
        for shard in tensor.shards:
            if shard.local is None or shard.local.numel() < 2:
                continue
            content = shard.values().numpy().tobytes()
            rank, region = seen.setdefault(content, (shard.rank, shard.region.key))
            if region != shard.region.key:
                operation = RepeatedShard(ranks=(rank, shard.rank))
                return self.accept(explain_by(Cause.DUPLICATE, operation, tensors, inputs))
        return self.refuse()


HYPOTHESIS = RepeatedShardHypothesis()
