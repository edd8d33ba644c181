"""Hypothesis: replicas hold partial sums, so a reduction over an axis is missing."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.explain.fitting.factors import find_factor
from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.replicas import SumOfReplicas, sum_replicas
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Explanation, Quantity
from moeverify.results.factor import Product, Source
from moeverify.results.observation import ReplicaSum
from moeverify.results.operation import Unreduced

_CAUSES = {
    # Gradients were compared before and are right: only the reported number is wrong.
    Quantity.LOSS: Cause.METRIC,
    Quantity.ROUTING_COUNT: Cause.STATE,
}


class ReplicaSumHypothesis(Hypothesis):
    """The replicas on an axis differ, and their sum is the golden, or the multiple that a mean leaves.

    Every axis is tested. The first that fits is named: axes whose ranks all hold a replica come before
    others, then data axes before expert axes. Axes with the same groups are named together, because only
    another layout can distinguish them.
    """

    name = "replica_sum"
    quantities = frozenset(
        {
            Quantity.GRADIENT,
            Quantity.OUTPUT,
            Quantity.MODULE_GRADIENT,
            Quantity.LOSS,
            Quantity.ROUTING_COUNT,
            Quantity.TENSOR,
        }
    )

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome | None:
        """Add the replicas over every axis."""
        (tensor,) = tensors
        groups = inputs.groups_of(tensor)
        sums = sum_replicas(tensor, groups)
        fitting = [each for each in sums if each.explains]
        if not fitting:
            return None
        # If only the dp_shard ranks that share an expert's slices over etp hold a part, the axis is etp.
        first = next((each for each in fitting if each.is_whole), fitting[0])
        alike = [each for each in fitting if _same_groups(groups[each.axis], groups[first.axis])]
        explanation = self._explain(tensor, first, alike, inputs)
        evidence = tuple(_observe(each) for each in fitting)
        return Outcome(explanation, evidence, num_coefficients=1)

    def _explain(
        self,
        tensor: WrongTensor,
        first: SumOfReplicas,
        alike: Sequence[SumOfReplicas],
        inputs: DiagnosisInputs,
    ) -> Explanation:
        assert first.factor is not None
        sources = [Source(name=each.axis, size=each.num_replicas) for each in alike]
        operation = Unreduced(
            axes=tuple(Product(times=(each.axis,)) for each in alike),
            num_replicas=first.num_replicas,
            factor=find_factor(first.factor, sources),
        )
        cause = _CAUSES.get(tensor.quantity, Cause.MISSING_REDUCTION)
        return explain_by(cause, operation, [tensor], inputs, residual=first.residual)


def _observe(found: SumOfReplicas) -> ReplicaSum:
    return ReplicaSum(
        axis=found.axis, num_replicas=found.num_replicas, factor=found.factor, residual=found.residual
    )


def _same_groups(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> bool:
    return {tuple(group) for group in first} == {tuple(group) for group in second}


HYPOTHESIS = ReplicaSumHypothesis()
