"""Hypothesis: a step began with other optimizer state than the step before had left, and then did as it should.

An optimizer sums its state up: s' = d * s + h(gradient), with a decay d that the recipe gives. The gradient is right
here, so what is wrong with s' is d times what was wrong with s, and the s that a step began with is known from the
golden and the result: s = s_golden + (s' - s'_golden) / d. Where that is zero, another slice's, an older one or a
multiple, the state was lost, or came from elsewhere, between the two steps: in an exchange of experts, a load, a
reset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeverify.diagnose.factors import find_factor
from moeverify.diagnose.families import split_moment
from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.diagnose.hypotheses.permutation import MOST_MOVES
from moeverify.diagnose.inputs import STEP_BEFORE, DiagnosisInputs
from moeverify.diagnose.slices import make_block, match_slices
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.layout.region import Region
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.factor import SAME, Factor, is_same
from moeverify.results.operation import Carried
from moeverify.results.trial import Reason

_OLDEST = 3
"""So many steps back a state is looked for: that of a stale copy is one or two steps older."""


@dataclass(frozen=True)
class Began:
    """What the step began with, the golden's state of the step before, and how large rounding may be.

    Shapes: all are those of the tensor, or of a region of it; `allowed` is the error of each element by rounding.
    """

    actual: Tensor
    expected: Tensor
    allowed: Tensor

    def along(self, dim: int) -> list[Began]:
        """Return the slices along a dim."""
        parts = (each.movedim(dim, 0) for each in (self.actual, self.expected, self.allowed))
        return [Began(*slices) for slices in zip(*parts, strict=True)]

    def equals(self, expected: Tensor) -> bool:
        """Return whether it began with some values, but for rounding."""
        return bool((self.actual - expected).norm() <= self.allowed.norm())

    def find_multiple(self) -> float | None:
        """Return how many times the golden's state it began with; None where it is no multiple of it.

        One where the golden's is too small to tell zero from one, since nothing is wrong then.
        """
        if self.equals(self.expected):
            return 1.0
        if self.equals(torch.zeros_like(self.expected)):
            return 0.0
        square = float((self.expected * self.expected).sum())
        if self.expected.numel() < 2 or square == 0.0:  # one number is a multiple of any other
            return None
        factor = float((self.actual * self.expected).sum()) / square
        return factor if self.equals(factor * self.expected) else None


class CarriedState(Hypothesis):
    """The state that the step began with is zero, a multiple, older, or another slice's, in all that is wrong."""

    name = "carried_state"
    quantities = frozenset({Quantity.OPTIMIZER_STATE})

    def applies(self, tensor: WrongTensor, inputs: DiagnosisInputs) -> bool:
        """Return whether it is a moment that is summed up over steps."""
        return super().applies(tensor, inputs) and inputs.decays.get(split_moment(tensor.name)[1], 0.0) > 0.0

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Compute what the step began with, and compare it rank by rank, then slice by slice."""
        (tensor,) = tensors
        before = inputs.earlier(tensor.key).get(STEP_BEFORE)
        if before is None or before.numel() != tensor.expected.numel():
            return self.untried(Reason.NO_EARLIER_VALUE)
        whole = _find_began(tensor, Region.whole(before.shape), tensor.whole, before, inputs)
        by_rank = [
            (shard.rank, _find_began(tensor, shard.region, shard.values(), before, inputs))
            for shard in tensor.shards
            if shard.local is not None and shard.region.numel
        ]
        operation = (
            _explain_ranks(by_rank, tensor, inputs)
            or _explain_by_age(by_rank, tensor, inputs)
            or _explain_slices(whole, tensor, inputs)
        )
        if operation is None:
            return self.refuse()
        ranks = tuple(sorted({rank for rank, began in by_rank if not began.equals(began.expected)}))
        is_everywhere = len(ranks) == len({rank for rank, _ in by_rank})
        operation = operation.model_copy(update={"ranks": () if is_everywhere else ranks})
        return self.accept(explain_by(Cause.CARRIED_STATE, operation, tensors, inputs))


def _find_began(
    tensor: WrongTensor, region: Region, values: Tensor, before: Tensor, inputs: DiagnosisInputs
) -> Began:
    """Return the state at the beginning of the step in a region, computed from the state after it.

    Shapes: `values` those of the region, `before` that of the tensor, the golden's state of the step before.
    """
    decay = inputs.decays[split_moment(tensor.name)[1]]
    shape = region.local_shape
    expected, left = (
        region.take(each.to("cpu", torch.float64).reshape(tensor.expected.shape)).reshape(shape)
        for each in (tensor.expected, before)
    )
    values = values.to("cpu", torch.float64).reshape(shape)
    actual = left + (values - expected) / decay
    # What is right may be zero, as of an expert without tokens; what is there was rounded all the same.
    summed = torch.maximum(expected.abs(), values.abs())
    return Began(actual, left, tensor.exact * (summed / decay + left.abs()))


def _explain_ranks(
    by_rank: Sequence[tuple[int, Began]], tensor: WrongTensor, inputs: DiagnosisInputs
) -> Carried | None:
    """Return the multiple that the shards of some ranks began with, where the others began right."""
    factor = _find_one([began.find_multiple() for _, began in by_rank])
    return None if factor is None else Carried(factor=_name(factor, tensor, inputs))


def _explain_by_age(
    by_rank: Sequence[tuple[int, Began]], tensor: WrongTensor, inputs: DiagnosisInputs
) -> Carried | None:
    """Return how old the state is that the shards of some ranks began with, where the others began right."""
    regions = [shard.region for shard in tensor.shards if shard.local is not None and shard.region.numel]
    for num_steps in range(2, _OLDEST + 1):
        older = inputs.golden(tensor.key[1], tensor.name, num_steps)
        if older is None or older.numel() != tensor.expected.numel():
            continue
        values = older.to("cpu", torch.float64).reshape(tensor.expected.shape)
        fits = [
            began.equals(began.expected) or began.equals(region.take(values).reshape(region.local_shape))
            for (_, began), region in zip(by_rank, regions, strict=True)
        ]
        if all(fits) and not all(began.equals(began.expected) for _, began in by_rank):
            return Carried(num_steps=num_steps)
    return None


def _explain_slices(whole: Began, tensor: WrongTensor, inputs: DiagnosisInputs) -> Carried | None:
    """Return the multiple, or the other slices' state, that some slices along a dim began with."""
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
        # What was computed back is not as exact as a value that was read: a state of zero is zero but for rounding.
        allowed = whole.allowed.movedim(dim, 0).flatten(1).norm(dim=1)
        source = match_slices(whole.expected, whole.actual, dim, allowed=allowed)
        moves = tuple((to, origin) for to, origin in enumerate(source or ()) if to != origin)
        if moves:
            block = make_block(tensor.name, dim, [to for to, _ in moves])
            return Carried(moves=moves[:MOST_MOVES], block=block)
    return None


def _find_one(multiples: Sequence[float | None]) -> float | None:
    """Return the one factor besides 1 that all multiples are; None where some are none, or several differ."""
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
