"""Hypothesis: what was all-reduced last met other ranks than it should, or was not added up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.reductions import Meeting, ReadReduction, list_meetings, read_meeting
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.factor import Product
from moeverify.results.observation import Distance
from moeverify.results.operation import Misreduced
from moeverify.results.trial import Reason

_CAUSES: Mapping[Quantity, Cause] = {
    Quantity.ROUTING_COUNT: Cause.STATE,
    Quantity.OUTPUT: Cause.FORWARD,
}


class MisreducedHypothesis(Hypothesis):
    """What ranks have is the sum, or the largest, of what a group brought; the golden is the sum over another.

    Read from the operands of the all-reduce alone: of a gradient that was completed after the backward pass, of
    counts, and of what a module takes or returns.
    """

    name = "misreduced"
    quantities = frozenset(
        {Quantity.GRADIENT, Quantity.ROUTING_COUNT, Quantity.OUTPUT, Quantity.MODULE_GRADIENT}
    )
    generalizes = ("detached", "replica_sum")

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Try every all-reduce of the size of the tensor, the last ones first."""
        (tensor,) = tensors
        outcome = self._test(tensor, inputs)
        origin = inputs.origin_of(tensor)
        if outcome.explanation is not None or origin is None or inputs.search is None:
            return outcome
        for near in inputs.search.around.get(origin.direction, ()):
            found = self._test(near.tensor, inputs)
            if found.explanation is not None:
                return found
        return outcome

    def _test(self, tensor: WrongTensor, inputs: DiagnosisInputs) -> Outcome:
        shards = [shard for shard in tensor.shards if shard.region.numel]
        if any(shard.local is None for shard in shards) or len({shard.rank for shard in shards}) < 2:
            return self.untried(Reason.NOT_HELD)
        actual = _join((shard.rank, shard.values()) for shard in shards)
        expected = _join((shard.rank, tensor.expected_of(shard)) for shard in shards)
        meetings = list(_list_meetings(tensor, actual, inputs))
        if not meetings:
            return self.untried(Reason.NO_SUCH_PARTS)
        for meeting in meetings:
            reading = read_meeting(meeting, actual, expected, inputs.axes.groups, tensor.exact)
            if reading is not None:
                return self._explain(tensor, reading, inputs)
        return self.refuse()

    def _explain(self, tensor: WrongTensor, reading: ReadReduction, inputs: DiagnosisInputs) -> Outcome:
        met = [axis for axis, groups in inputs.axes.groups.items() if _is_of(reading.meeting, groups)]
        operation = Misreduced(
            op=next(iter(reading.meeting.collectives.values())).op,
            site=reading.meeting.site,
            met=tuple(Product(times=(axis,)) for axis in met),
            ranks=reading.meeting.groups[0],
            combination=reading.combination,
            axes=tuple(Product(times=(axis,)) for axis in reading.axes),
        )
        cause = _CAUSES.get(tensor.quantity, Cause.SCALE if not reading.axes else Cause.MISSING_REDUCTION)
        explanation = explain_by(cause, operation, [tensor], inputs, residual=reading.residual)
        return self.accept(explanation, Distance(error=reading.residual), residual=reading.residual)


def _list_meetings(
    tensor: WrongTensor, actual: Mapping[int, Tensor], inputs: DiagnosisInputs
) -> Iterator[Meeting]:
    """Yield the all-reduces of which a tensor may come: those inside the module where it was read, or of its size."""
    origin = inputs.origin_of(tensor)
    if origin is None:
        yield from list_meetings(inputs.brought, {rank: values.numel() for rank, values in actual.items()})
        return
    for reduced in origin.reduced:
        values = _join((shard.rank, shard.values()) for shard in reduced.tensor.shards)
        # Another module's, beside the first wrong one, may be of another size.
        is_alike = {rank: each.numel() for rank, each in values.items()} == {
            rank: each.numel() for rank, each in actual.items()
        }
        if is_alike and set(values) == set(reduced.collectives):
            yield Meeting(reduced.collectives, values)


def _join(parts: Iterable[tuple[int, Tensor]]) -> dict[int, Tensor]:
    """Return what each rank has, one micro-batch after another. Shape: (elements)."""
    found: dict[int, list[Tensor]] = {}
    for rank, values in parts:
        found.setdefault(rank, []).append(values.reshape(-1))
    return {rank: torch.cat(members) for rank, members in found.items()}


def _is_of(meeting: Meeting, groups: Sequence[Sequence[int]]) -> bool:
    """Return whether the groups that met are those of an axis."""
    return set(meeting.groups) <= {tuple(group) for group in groups}


HYPOTHESIS = MisreducedHypothesis()
