"""Hypothesis: a step began with wrong optimizer state, and then computed correctly.

An optimizer accumulates s' = d * s + h(gradient), with a decay d from the recipe. The gradient is right
here, so the error of s' is d times the error of s. The initial s follows from the golden and the result: s
= s_golden + (s' - s'_golden) / d.

If this s is zero, a multiple, or another slice's state, the state was lost or replaced between the two
steps: in an exchange of experts, a load or a reset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeverify.explain.fitting.factors import find_factor
from moeverify.explain.fitting.families import split_moment
from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.explain.fitting.hypotheses.permutation import MOST_MOVES
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.slices import make_block, match_slices
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.parallel.regions.region import Region
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.factor import SAME, Factor, is_same
from moeverify.results.operation import Carried


@dataclass(frozen=True)
class Began:
    """State at the start of the step: `actual`, the golden's `expected`, and the rounding error `allowed`.

    All have the shape of the tensor or of a region of it; `allowed` is the error of each element.
    """

    actual: Tensor
    expected: Tensor
    allowed: Tensor

    def along(self, dim: int) -> list[Began]:
        """Return the slices along a dim."""
        parts = (each.movedim(dim, 0) for each in (self.actual, self.expected, self.allowed))
        return [Began(*slices) for slices in zip(*parts, strict=True)]

    def equals(self, expected: Tensor) -> bool:
        """Return whether the step began with these values, up to rounding."""
        return bool((self.actual - expected).norm() <= self.allowed.norm())

    def find_multiple(self) -> float | None:
        """Return the multiple of the golden's state with which the step began; None if it is no multiple.

        Return 1 if the golden's state is too small to distinguish zero from one, because then nothing is
        wrong.
        """
        if self.equals(self.expected):
            return 1.0
        if self.equals(torch.zeros_like(self.expected)):
            return 0.0
        square = float((self.expected * self.expected).sum())
        if self.expected.numel() < 2 or square == 0.0:  # a single number is a multiple of any other
            return None
        factor = float((self.actual * self.expected).sum()) / square
        return factor if self.equals(factor * self.expected) else None


class CarriedState(Hypothesis):
    """In all wrong parts, the initial state is zero, a multiple, or another slice's."""

    name = "carried_state"
    quantities = frozenset({Quantity.OPTIMIZER_STATE})

    def applies(self, tensor: WrongTensor, inputs: DiagnosisInputs) -> bool:
        """Return whether the tensor is a moment that accumulates over steps."""
        return super().applies(tensor, inputs) and inputs.decays.get(split_moment(tensor.name)[1], 0.0) > 0.0

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome | None:
        """Compute the initial state, and compare it by rank, then by slice."""
        (tensor,) = tensors
        before = inputs.earlier(tensor.key)
        if before is None or before.numel() != tensor.expected.numel():
            return None
        whole = _find_began(tensor, Region.whole(before.shape), tensor.whole, before, inputs)
        by_rank = [
            (shard.rank, _find_began(tensor, shard.region, shard.values(), before, inputs))
            for shard in tensor.shards
            if shard.local is not None and shard.region.numel
        ]
        operation = _explain_ranks(by_rank, tensor, inputs) or _explain_slices(whole, tensor, inputs)
        if operation is None:
            return None
        ranks = tuple(sorted({rank for rank, began in by_rank if not began.equals(began.expected)}))
        is_everywhere = len(ranks) == len({rank for rank, _ in by_rank})
        operation = operation.model_copy(update={"ranks": () if is_everywhere else ranks})
        return self.accept(explain_by(Cause.CARRIED_STATE, operation, tensors, inputs))


def _find_began(
    tensor: WrongTensor, region: Region, values: Tensor, before: Tensor, inputs: DiagnosisInputs
) -> Began:
    """Return the state at the start of the step in a region, computed from the state after it.

    `values` has the shape of the region. `before` has the shape of the tensor: the golden's state of the
    previous step.
    """
    decay = inputs.decays[split_moment(tensor.name)[1]]
    shape = region.local_shape
    expected, left = (
        region.take(each.to("cpu", torch.float64).reshape(tensor.expected.shape)).reshape(shape)
        for each in (tensor.expected, before)
    )
    values = values.to("cpu", torch.float64).reshape(shape)
    actual = left + (values - expected) / decay
    # The right state may be zero, as for an expert without tokens, but the actual state was rounded all the
    # same.
    summed = torch.maximum(expected.abs(), values.abs())
    return Began(actual, left, tensor.exact * (summed / decay + left.abs()))


def _explain_ranks(
    by_rank: Sequence[tuple[int, Began]], tensor: WrongTensor, inputs: DiagnosisInputs
) -> Carried | None:
    """Return the multiple with which some shards began, if all others began right."""
    factor = _find_one([began.find_multiple() for _, began in by_rank])
    return None if factor is None else Carried(factor=_name(factor, tensor, inputs))


def _explain_slices(whole: Began, tensor: WrongTensor, inputs: DiagnosisInputs) -> Carried | None:
    """Return the multiple, or the other slices' state, with which some slices along a dim began."""
    for dim, size in enumerate(whole.actual.shape):
        if size < 2 or whole.actual.numel() < 2 * size:
            continue
        multiples = [began.find_multiple() for began in whole.along(dim)]
        factor = _find_one(multiples)
        if factor is not None:
            wrong = [
                index for index, each in enumerate(multiples) if each is not None and not is_same(each, 1.0)
            ]
            block = make_block(tensor.name, dim, wrong)
            return Carried(factor=_name(factor, tensor, inputs), block=block)
        # A state computed backward is less exact than one that was read: zero means zero up to rounding.
        allowed = whole.allowed.movedim(dim, 0).flatten(1).norm(dim=1)
        source = match_slices(whole.expected, whole.actual, dim, allowed=allowed)
        moves = tuple((to, origin) for to, origin in enumerate(source or ()) if to != origin)
        if moves:
            block = make_block(tensor.name, dim, [to for to, _ in moves])
            return Carried(moves=moves[:MOST_MOVES], block=block)
    return None


def _find_one(multiples: Sequence[float | None]) -> float | None:
    """Return the common factor of all multiples other than 1; None if some are None, or several differ."""
    wrong = [each for each in multiples if each is None or not is_same(each, 1.0)]
    first = wrong[0] if wrong else None
    if first is None or any(
        each is None or abs(each - first) > SAME * max(1.0, abs(first)) for each in wrong
    ):
        return None
    return first


def _name(factor: float, tensor: WrongTensor, inputs: DiagnosisInputs) -> Factor:
    return find_factor(factor, inputs.sources_of([tensor]))


HYPOTHESIS = CarriedState()
