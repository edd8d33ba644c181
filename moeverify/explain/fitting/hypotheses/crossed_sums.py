"""Hypothesis: a rank added its parts of some slices to the sums of others, by using a wrong group.

Each part was still summed once, in some group. So the wrong sums have the right total, and the ranks that
met in one group hold the same value for different slices. The ranks' values show both, without any known
part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.slices import make_block
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.observation import Distance
from moeverify.results.operation import Crossed
from moeverify.results.trial import Reason


@dataclass(frozen=True)
class Copy:
    """A rank's values of the slice `index`, which differ from the golden."""

    rank: int
    index: int
    values: Tensor


class CrossedSums(Hypothesis):
    """As many wrong values as wrong slices, with the right total; some values occur in several slices."""

    name = "crossed_sums"
    quantities = frozenset({Quantity.GRADIENT})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Group the wrong slices of all ranks along dim 0 by value, and add up one of each group."""
        (tensor,) = tensors
        if tensor.expected.ndim < 2 or tensor.expected.shape[0] < 2:
            return self.untried(Reason.NOT_COMPARABLE)
        wrong = list(_list_wrong(tensor))
        indices = sorted({each.index for each in wrong})
        sums = _group_equal(wrong, tensor.exact)
        if len(indices) < 2 or len(sums) != len(indices) or not any(map(_is_crossed, sums)):
            return self.refuse()
        total = torch.stack([members[0].values for members in sums]).sum(dim=0)
        right = tensor.expected[indices].sum(dim=0)
        error = float((total - right).norm()) / max(float(right.norm()), 1e-300)
        seen = Distance(error=error)
        if not error <= tensor.exact:
            return self.refuse(seen)
        everywhere = set.intersection(*({each.rank for each in members} for members in sums))
        ranks = tuple(everywhere) if len(everywhere) == 1 else ()
        operation = Crossed(block=make_block(tensor.name, 0, indices), ranks=ranks)
        return self.accept(explain_by(Cause.COLLECTIVES, operation, tensors, inputs, residual=error), seen)


def _list_wrong(tensor: WrongTensor) -> Iterator[Copy]:
    """Yield the whole slices of every rank that differ from the golden."""
    for shard in tensor.shards:
        if shard.local is None or not shard.region.dims or not shard.region.numel:
            continue
        rows, *others = shard.region.dims
        if [len(each) for each in others] != list(tensor.expected.shape[1:]):
            continue  # parts of slices are comparable only with parts of the same place
        for index, values in zip(rows, shard.values(), strict=True):
            expected = tensor.expected[index]
            if not _is_equal(values, expected, tensor.exact):
                yield Copy(shard.rank, index, values)


def _group_equal(copies: Sequence[Copy], exact: float) -> list[list[Copy]]:
    """Return the copies grouped by equal values."""
    groups: list[list[Copy]] = []
    for copy in copies:
        group = next((group for group in groups if _is_equal(copy.values, group[0].values, exact)), None)
        if group is None:
            groups.append([copy])
        else:
            group.append(copy)
    return groups


def _is_crossed(members: Sequence[Copy]) -> bool:
    """Return whether one value occurs for different slices."""
    return len({each.index for each in members}) > 1


def _is_equal(first: Tensor, second: Tensor, exact: float) -> bool:
    return float((first - second).norm()) <= exact * max(float(first.norm()), float(second.norm()))


HYPOTHESIS = CrossedSums()
