"""Hypothesis: some elements are zero and all others are right, because a part of a buffer was not written."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import RankShard, WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.observation import WrongElements
from moeverify.results.operation import LostElements

_LEAST = 2  # a single element may be zero by chance or by rounding
_MOST_SLICES = 4


class Lost(Hypothesis):
    """Every wrong element is exactly zero, on the ranks that hold it."""

    name = "lost_elements"
    quantities = frozenset({Quantity.GRADIENT, Quantity.LOADED})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome | None:
        """Check the wrong elements of each shard."""
        (tensor,) = tensors
        allowed = tensor.exact * float(tensor.expected.abs().max()) if tensor.expected.numel() else 0.0
        num_lost = num_elements = 0
        ranks: list[int] = []
        masks: list[tuple[RankShard, Tensor]] = []
        at_end = True
        for shard in tensor.shards:
            if shard.local is None:
                return None
            actual = shard.values().reshape(-1)
            wrong = (actual - tensor.expected_of(shard).reshape(-1)).abs() > allowed
            num_wrong = int(wrong.sum())
            if bool((wrong & (actual != 0.0)).any()):
                return None
            num_elements = max(num_elements, actual.numel())
            if num_wrong:
                num_lost = max(num_lost, num_wrong)
                ranks.append(shard.rank)
                masks.append((shard, wrong.reshape(shard.region.local_shape)))
                at_end = at_end and _are_last(shard, num_wrong)
        seen = WrongElements(num_wrong=num_lost, num_elements=num_elements)
        if num_lost < _LEAST or num_lost == num_elements:
            return None
        dim, slices = _find_slices(masks)
        operation = LostElements(
            num_lost=num_lost,
            num_elements=num_elements,
            at_end=at_end,
            ranks=tuple(sorted(set(ranks))),
            dim=dim,
            slices=tuple(slices[:_MOST_SLICES]),
            num_slices=len(slices),
            own=_find_own(masks, dim)[:_MOST_SLICES],
        )
        return self.accept(explain_by(Cause.DETACHED, operation, tensors, inputs), seen)


def _are_last(shard: RankShard, num_wrong: int) -> bool:
    """Return whether the last `num_wrong` elements of a shard are all zero."""
    last = shard.values().reshape(-1)[-num_wrong:]
    return bool(torch.all(last == 0.0))


def _find_slices(masks: Sequence[tuple[RankShard, Tensor]]) -> tuple[int | None, list[int]]:
    """Return the dim along which wrong elements are whole slices, and their global indices.

    Return (None, []) if there is none. Elements whose right value is zero are not wrong, so slices may lack
    some. If two dims fit, take the one with fewer slices.
    """
    found: dict[int, list[int]] = {}
    for dim in range(masks[0][1].ndim if masks[0][0].region.dims else 0):
        indices: set[int] = set()
        for shard, wrong in masks:
            by_slice = wrong.movedim(dim, 0).reshape(wrong.shape[dim], -1)
            zero = (shard.values().reshape(wrong.shape) == 0.0).movedim(dim, 0).reshape(by_slice.shape)
            lost = by_slice.any(dim=1)
            if by_slice.shape[1] < _LEAST or not bool(zero[lost].all()):
                break
            indices |= {shard.region.dims[dim][place] for place in lost.nonzero().flatten().tolist()}
        else:
            found[dim] = sorted(indices)
    if not found:
        return None, []
    dim = min(found, key=lambda each: len(found[each]))
    return dim, found[dim]


def _find_own(masks: Sequence[tuple[RankShard, Tensor]], dim: int | None) -> tuple[int, ...]:
    """Return the local indices of the slices, if equal on all ranks and different from the global ones."""
    if dim is None:
        return ()
    found = {
        tuple(wrong.movedim(dim, 0).reshape(wrong.shape[dim], -1).any(dim=1).nonzero().flatten().tolist())
        for _, wrong in masks
    }
    is_moved = any(shard.region.dims[dim][0] for shard, _ in masks)
    return found.pop() if len(found) == 1 and is_moved else ()


HYPOTHESIS = Lost()
