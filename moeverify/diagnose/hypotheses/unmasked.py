"""Hypothesis: ranks divide the elements of a tensor among them, and have values for those of others too."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.replicas import find_replicas
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.factor import Product
from moeverify.results.observation import OwnElements
from moeverify.results.operation import Unmasked
from moeverify.results.trace import CollectiveRecord


class UnmaskedHypothesis(Hypothesis):
    """Every element is right on one rank of the axis, each rank has some of them alone, and the rest is not zero.

    That holds of what a module takes or returns, or of what ranks bring to an all-reduce inside of it.

    So it is where each rank computes for its own experts or words, and clamps the index of those of others: a mask
    is missing. Shapes: the replicas of a region as (ranks, elements).
    """

    name = "unmasked"
    quantities = frozenset({Quantity.OUTPUT, Quantity.MODULE_GRADIENT})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Look over every axis at which elements are right on which ranks."""
        (tensor,) = tensors
        origin = inputs.origin_of(tensor)
        summed = [(each.tensor, each.collective) for each in (origin.reduced if origin is not None else ())]
        groups = inputs.groups_of(tensor)
        for brought, collective in [(tensor, None), *summed]:
            seen = [each for axis in groups if (each := _look(brought, axis, groups[axis])) is not None]
            if seen:
                axes = tuple(Product(times=(each.axis,)) for each in seen)
                operation = Unmasked(axes=axes, num_ranks=len(seen[0].num_own), summed_by=_name(collective))
                cause = Cause.FORWARD if tensor.quantity is Quantity.OUTPUT else Cause.BACKWARD
                return self.accept(explain_by(cause, operation, tensors, inputs), *seen)
        return self.refuse()


def _name(collective: CollectiveRecord | None) -> str:
    return "" if collective is None else f"{collective.op} at {collective.site}"


def _look(tensor: WrongTensor, axis: str, groups: Sequence[Sequence[int]]) -> OwnElements | None:
    """Return how many elements each rank of an axis has right alone; None where that does not explain the tensor."""
    bound = tensor.exact * float(tensor.expected.abs().max())
    found = [
        count_own(torch.stack([shard.values().flatten() for shard in members]), wanted, bound)
        for members in find_replicas(tensor, groups)
        if (wanted := tensor.expected_of(members[0]).flatten()).any()
    ]
    counts = [each for each in found if each is not None]
    if not counts or len(counts) < len(found) or len({len(each) for each in counts}) > 1:
        return None
    totals = tuple(sum(column) for column in zip(*counts, strict=True))
    return OwnElements(axis=axis, num_own=totals, num_elements=tensor.expected.numel())


def count_own(replicas: Tensor, wanted: Tensor, bound: float) -> tuple[int, ...] | None:
    """Return how many elements are right on each rank alone; None where some are right nowhere, or a rank has none.

    None too where ranks have zeros for what is not theirs: then only a sum is missing.
    """
    right = (replicas - wanted).abs() <= bound
    alone = right & (right.sum(dim=0) == 1)
    has_values = bool(((replicas.abs() > bound) & ~right).any())
    if len(replicas) < 2 or not has_values or not bool(right.any(dim=0).all()):
        return None
    if not bool(alone.any(dim=1).all()) or bool(right.all(dim=1).any()):
        return None
    return tuple(alone.sum(dim=1).tolist())


HYPOTHESIS = UnmaskedHypothesis()
