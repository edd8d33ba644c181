"""Edits of rows that an index puts in another order: by the inverse of the index, or in the order they have."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from moeverify.explain.align import Alignment
from moeverify.explain.chains import list_group
from moeverify.explain.edit import Edit
from moeverify.explain.indexing import find_chosen
from moeverify.explain.joint import At, Changes
from moeverify.explain.operators import run
from moeverify.explain.program import Op

_ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "its inverse": torch.argsort,
    "the order of the rows as they are": lambda index: torch.arange(len(index)),
}


def list_inverses(alignment: Alignment, op: At) -> Iterator[Edit]:
    """Yield edits of an operator that permutes rows by an index, on all ranks and in all micro-batches.

    Rows are sorted by expert and back. A program may sort twice, or forget one of both.
    """
    group, results = list_group(alignment, op), alignment.joint.results(op)
    if not all(alignment.joint.value(at).is_floating for at in results):
        return  # the numbers of rows: their order is what the index says
    for name, order in _ORDERS.items():
        changes = Changes()
        for at in group:
            found = find_chosen(alignment.joint.op(at))
            index = None if found is None else alignment.data((at[0], found[1]))
            if found is None or index is None or not _is_permutation(index):
                return
            changes.ops[at] = _reorder(alignment.joint.op(at), found[1], order(index))
        yield Edit("number", group, changes, {}, (1,), (("this permutation", name),))


def _reorder(op: Op, index: int, order: Tensor) -> Callable[[Callable[[int], Tensor]], list[Tensor]]:
    return lambda lookup: run(op, lambda number: order if number == index else lookup(number))


def _is_permutation(index: Tensor) -> bool:
    is_flat = index.ndim == 1 and index.dtype == torch.int64 and len(index) > 1
    return is_flat and torch.equal(index.sort().values, torch.arange(len(index)))
