"""Hypothesis: replicas hold partial sums in some slices along a dim, and right values in the others."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.explain.fitting.factors import find_factor
from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.replicas import find_partial_slices
from moeverify.explain.fitting.slices import make_block
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.factor import Product, Source
from moeverify.results.observation import ReplicaSum
from moeverify.results.operation import Unreduced
from moeverify.results.trial import Reason


class BlockSum(Hypothesis):
    """A reduction is missing for a part of a tensor.

    Examples are rotary rows of a latent projection, some heads or some experts.

    Along a dim, each slice is either right on all ranks of an axis, or its replicas there add up to the
    right one.
    """

    name = "block_sum"
    quantities = frozenset({Quantity.GRADIENT, Quantity.MODULE_GRADIENT})
    generalizes = ("replica_sum",)

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Test every axis and every dim of tensors that ranks hold whole."""
        (tensor,) = tensors
        tried = False
        for axis, groups in inputs.groups_of(tensor).items():
            for dim in range(tensor.expected.ndim):
                indices = find_partial_slices(tensor, groups, dim)
                tried = tried or indices is not None
                if not indices:
                    continue
                size = max(map(len, groups))
                operation = Unreduced(
                    axes=(Product(times=(axis,)),),
                    num_replicas=size,
                    factor=find_factor(1.0, [Source(name=axis, size=size)]),
                    block=make_block(tensor.name, dim, indices),
                )
                explanation = explain_by(Cause.MISSING_REDUCTION, operation, tensors, inputs)
                return self.accept(explanation, ReplicaSum(axis=axis, num_replicas=size, factor=1.0))
        return self.refuse() if tried else self.untried(Reason.REPLICAS_EQUAL)


HYPOTHESIS = BlockSum()
