"""Hypothesis: what is reported of the routing of a micro-batch is that of another one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.wrong_tensor import RankShard, WrongTensor
from moeverify.layout.region import Indices, Region
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.operation import Moved
from moeverify.results.trial import Reason

_LEAST_NUMBERS = 8  # fewer choices agree by chance


class OtherMicroBatch(Hypothesis):
    """Each wrong part is what the golden has for the tokens of another micro-batch of the rank.

    The golden has the tokens of the whole batch, so what a rank should have for each of its micro-batches is known.
    """

    name = "other_micro_batch"
    quantities = frozenset({Quantity.EXPERT_CHOICE, Quantity.ROUTING_WEIGHT})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Compare each wrong part with the golden's parts of the other micro-batches."""
        (tensor,) = tensors
        wrong = [shard for shard in tensor.shards if _is_wrong(tensor, shard, shard.region)]
        if not wrong or not all(len(inputs.micro_batches.get(shard.rank, ())) > 1 for shard in wrong):
            return self.untried(Reason.NOT_COMPARABLE)
        moves = [_find_source(tensor, shard, inputs.micro_batches[shard.rank]) for shard in wrong]
        found = sorted({move for move in moves if move is not None})
        if None in moves or sum(shard.region.numel for shard in wrong) < _LEAST_NUMBERS:
            return self.refuse()
        operation = Moved(unit="micro-batch", moves=tuple(found), num_moves=len(found))
        return self.accept(explain_by(Cause.METRIC, operation, tensors, inputs))


def _is_wrong(tensor: WrongTensor, shard: RankShard, region: Region) -> bool:
    """Return whether a part is not what the golden has in a region."""
    if shard.local is None:
        return True
    wanted = region.take(tensor.expected).reshape(shard.region.local_shape)
    if tensor.quantity is Quantity.EXPERT_CHOICE:
        return not torch.equal(shard.values(), wanted)
    return not float((shard.values() - wanted).norm()) <= tensor.exact * float(wanted.norm())


def _find_source(
    tensor: WrongTensor, shard: RankShard, micro_batches: Sequence[tuple[Indices, Indices]]
) -> tuple[int, int] | None:
    """Return the micro-batch of a part, and the other one whose values it has; None where it has those of none."""
    rows = [tuple(each) for each, _ in micro_batches]
    own = tuple(shard.region.dims[0]) if shard.region.dims else ()
    if own not in rows:
        return None
    for number, region in _list_others(shard.region, rows):
        if not _is_wrong(tensor, shard, region):
            return rows.index(own), number
    return None


def _list_others(region: Region, rows: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, Region]]:
    """Yield the regions of the other micro-batches that have as many rows, with their numbers."""
    for number, other in enumerate(rows):
        if other != tuple(region.dims[0]) and len(other) == len(region.dims[0]):
            yield number, Region.box(region.shape, (other, *region.dims[1:]))


HYPOTHESIS = OtherMicroBatch()
