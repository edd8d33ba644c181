"""Hypothesis: a loaded tensor has the values of another saved tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import RankShard, WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.operation import Replaced


class AnotherTensor(Hypothesis):
    """The wrong shards equal another saved tensor of the same shape.

    If that one is wrong too, they were exchanged. Ranks that loaded the tensor correctly, with their own
    parts or copies, may be excluded.
    """

    name = "another_tensor"
    quantities = frozenset({Quantity.LOADED})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome | None:
        """Compare with all saved tensors of the same shape."""
        (tensor,) = tensors
        saved, wrong = inputs.saved, _list_wrong(tensor)
        # Constant tensors equal others by chance.
        if saved is None or not any(
            bool((each.values() != each.values().flatten()[0]).any()) for each in wrong
        ):
            return None
        ranks = tuple(sorted({each.rank for each in wrong}))
        is_everywhere = set(ranks) == {each.rank for each in tensor.shards if each.region.numel}
        for other in saved.by_shape.get(tuple(tensor.expected.shape), ()):
            if other == tensor.name:
                continue
            values = saved.read(other)
            if values is None or not _has(wrong, values.to(torch.float64)):
                continue
            exchanged = other in saved.wrong
            where = () if is_everywhere else ranks
            operation = Replaced(by="tensor", tensor=other, exchanged=exchanged, ranks=where)
            cause = Cause.PERMUTATION if exchanged else Cause.DUPLICATE
            return self.accept(explain_by(cause, operation, tensors, inputs))
        return None


def _list_wrong(tensor: WrongTensor) -> list[RankShard]:
    """Return the shards that differ from the saved values."""
    return [
        shard
        for shard in tensor.shards
        if shard.local is not None
        and shard.region.numel
        and not torch.equal(shard.values(), tensor.expected_of(shard))
    ]


def _has(shards: Sequence[RankShard], whole: Tensor) -> bool:
    """Return whether each shard equals its region of another tensor."""
    return all(
        torch.equal(shard.values(), shard.region.take(whole).reshape(shard.region.local_shape))
        for shard in shards
    )


HYPOTHESIS = AnotherTensor()
