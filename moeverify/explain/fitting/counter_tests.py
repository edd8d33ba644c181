"""Counter-tests of factors equal to the size of an axis: check other gradients on the axis.

An integer often equals the size of an axis by chance: 2 is also the number of uses of a tied weight. If the
axis is the cause, parameters that it shards or replicates alike are wrong too, or the code treats them
differently.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from moeverify.explain.fitting.families import name_family
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import RankShard, WrongTensor
from moeverify.results.explanation import Explanation, Quantity
from moeverify.results.observation import RightAlike

_MOST_UNITS = 8.0
"""Largest error that rounding leaves in 16 bits, in units of rounding."""


def count_right_alike(
    explanation: Explanation, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs
) -> Iterator[RightAlike]:
    """Yield, for each axis that may explain a factor, how many like gradients are right."""
    if any(tensor.quantity is not Quantity.GRADIENT for tensor in tensors):
        return
    wrong = {tensor.name for tensor in inputs.of_quantity(Quantity.GRADIENT)}
    named = dict.fromkeys(axis for product in explanation.candidates for axis in product.sources)
    for axis in named:
        if axis not in inputs.axes.groups:
            continue
        places = {_find_place(tensor.name, axis, inputs) for tensor in tensors}
        alike = [name for name in inputs.regions if _find_place(name, axis, inputs) in places]
        num_right = sum(name not in wrong for name in alike)
        if num_right:
            yield RightAlike(axis=axis, num_right=num_right, num_alike=len(alike))


def list_ranks_alone(tensors: Sequence[WrongTensor]) -> tuple[int, ...]:
    """Return the ranks on which all tensors are wrong, if other replicas of the same values are right."""
    found = {_list_wrong_replicas(tensor) for tensor in tensors}
    return next(iter(found)) if len(found) == 1 else ()


def _list_wrong_replicas(tensor: WrongTensor) -> tuple[int, ...]:
    """Return the ranks with wrong replicas; none if some region has only right or only wrong ones."""
    by_region: dict[str, dict[int, bool]] = {}
    for shard in tensor.shards:
        if shard.local is not None and shard.region.numel:
            by_region.setdefault(shard.region.key, {})[shard.rank] = _is_right(tensor, shard)
    if not by_region or not all(len(set(are_right.values())) == 2 for are_right in by_region.values()):
        return ()
    wrong = (rank for are_right in by_region.values() for rank, is_right in are_right.items() if not is_right)
    return tuple(sorted(wrong))


def _is_right(tensor: WrongTensor, shard: RankShard) -> bool:
    expected, precision = tensor.expected_of(shard), torch.finfo(tensor.precision)
    if precision.bits <= 16:
        left = float((shard.values() - expected).norm())
        return left <= _MOST_UNITS * precision.eps / 2.0 * float(expected.norm())
    return tensor.error_of(shard) <= tensor.exact * float(expected.norm())


def _find_place(name: str, axis: str, inputs: DiagnosisInputs) -> tuple[bool, str, frozenset[str]]:
    """Return how a parameter lies on an axis.

    The key has three parts: whether the axis shards it, its family, and the axes that affect it. Experts
    are reduced over other ranks than the router beside them, so the family distinguishes them.
    """
    regions = inputs.regions.get(name, {})
    is_sharded = any(
        len({regions[rank].key for rank in group if rank in regions}) > 1
        for group in inputs.axes.groups[axis]
    )
    return is_sharded, name_family([name]), frozenset(inputs.axes.groups_of(name))
