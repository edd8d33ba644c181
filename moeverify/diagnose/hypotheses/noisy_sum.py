"""Hypothesis: in 16 bits, replicas hold partial sums, so a reduction over an axis is missing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeverify.diagnose.factors import find_factor
from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.diagnose.hypotheses.noisy_factor import estimated, find_unit, is_of_16_bits
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.noisy_fit import NoisyFactor, fit_noisy, is_left_by_rounding, join_factors
from moeverify.diagnose.replicas import find_replicas
from moeverify.diagnose.wrong_tensor import RankShard, WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.factor import Product, Source
from moeverify.results.observation import ReplicaSum
from moeverify.results.operation import Unreduced
from moeverify.results.trial import Reason


class NoisySum(Hypothesis):
    """What the ranks of an axis hold differs by far more than rounding, and the sum is the golden but for rounding.

    Or it is a multiple that a mean leaves, as in `replica_sum`, which asks for more digits than 16 bits have.
    """

    name = "noisy_sum"
    quantities = frozenset({Quantity.GRADIENT})
    generalizes = ("replica_sum",)

    def applies(self, tensor: WrongTensor, inputs: DiagnosisInputs) -> bool:
        """Return whether the tensor was computed in 16 bits."""
        return super().applies(tensor, inputs) and is_of_16_bits(tensor)

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Add up the replicas over every axis."""
        (tensor,) = tensors
        groups = inputs.groups_of(tensor)
        found = {axis: _fit_sum(tensor, members) for axis, members in groups.items()}
        fitting = [(axis, fit) for axis, fit in found.items() if fit is not None]
        if not fitting:
            return self.refuse(reason=Reason.NO_MULTIPLE)
        axis, (count, value, factor) = fitting[0]
        alike = [other for other, _ in fitting if _as_sets(groups[other]) == _as_sets(groups[axis])]
        operation = Unreduced(
            axes=tuple(Product(times=(each,)) for each in alike),
            num_replicas=count,
            factor=find_factor(value, [Source(name=each, size=count) for each in alike]),
        )
        seen = ReplicaSum(axis=axis, num_replicas=count, factor=factor.value, residual=factor.residual)
        explanation = explain_by(
            Cause.MISSING_REDUCTION, operation, tensors, inputs, residual=factor.residual
        )
        return self.accept(estimated(explanation), seen, about=axis, residual=factor.residual)


def _fit_sum(tensor: WrongTensor, groups: Sequence[Sequence[int]]) -> tuple[int, float, NoisyFactor] | None:
    """Return the number of replicas, by how much their sum is the golden, and the factor as measured."""
    unit, size = find_unit(tensor), max(map(len, groups))
    factors: list[NoisyFactor] = []
    for members in find_replicas(tensor, groups):
        if len(members) != size or size < 2 or not _differ_much(members, unit):
            return None
        total = torch.stack([shard.values() for shard in members]).sum(dim=0)
        factor = fit_noisy(total, tensor.expected_of(members[0]), unit)
        if factor is None or not factor.is_noise(unit):
            return None
        factors.append(factor)
    joined = join_factors(factors) if factors else None
    if joined is None or not joined.is_sharp:
        return None
    near = [value for value in (1.0, float(size), 1.0 / size) if joined.agrees(value)]
    return (size, near[0], joined) if len(near) == 1 else None


def _differ_much(members: Sequence[RankShard], unit: float) -> bool:
    """Return whether no replica is what another is, but for rounding."""
    first, *others = (shard.values() for shard in members)
    return not any(is_left_by_rounding(other, first, 4.0 * unit) for other in others)


def _as_sets(groups: Sequence[Sequence[int]]) -> set[tuple[int, ...]]:
    return {tuple(group) for group in groups}


HYPOTHESIS = NoisySum()
