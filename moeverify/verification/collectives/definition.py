"""Elementwise definitions of collectives, to which `moeverify comm` compares real ones.

Does not import torch.

Element i of rank r has the value `step * r + i`, so that each value identifies its origin. `step` is a
power of ten above every i. Gradients of outputs are numbered in the same way.

The backward is the gradient of the sum of all ranks' losses. With y = A x over the elements of all ranks,
it is A transposed. The backward of an all-to-all is the reverse all-to-all. The backward of a gather is a
sum scattered to the ranks. The backward of a sum is a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

from moeverify.results.collective_name import CollectiveName
from moeverify.results.collective_run import Parts, RankTransfer, TensorSpan, Transfer, flatten

Sizes = Sequence[Sequence[int]]
"""Sizes[r][s]: number of elements that rank r has for rank s."""

TAKES_SPLITS: Mapping[CollectiveName, int] = {
    CollectiveName.ALL_TO_ALL: 2,
    CollectiveName.ALL_GATHER: 1,
    CollectiveName.REDUCE_SCATTER: 1,
}
"""Collectives with parts of unequal size: 2 if each pair of ranks has a size, 1 if each rank has a size."""


def define_transfer(collective: CollectiveName, sizes: Sizes, source: int = 0) -> Transfer:
    """Return the inputs and expected outputs of each rank.

    Shapes: all_to_all has `sizes` (n, n), where row r holds the sizes that rank r sends. The others have
    `sizes` (1, n): the part of each rank for all_gather and reduce_scatter, and n equal sizes for
    all_reduce and broadcast.
    """
    inputs, outputs, back = _RULES[collective](sizes, source)
    padded = (
        collective in (CollectiveName.ALL_GATHER, CollectiveName.REDUCE_SCATTER) and len(set(sizes[0])) > 1
    )
    return Transfer(
        collective=collective,
        source=source,
        padded_to=max(sizes[0]) if padded else 0,
        ranks=tuple(
            RankTransfer(
                rank=rank,
                sends=tuple(len(part.values) for part in inputs[rank]),
                receives=tuple(len(part.values) for part in outputs[rank]),
                input=inputs[rank],
                output=outputs[rank],
                output_gradient=_number(rank, [len(part.values) for part in outputs[rank]], _step(outputs)),
                input_gradient=back[rank],
            )
            for rank in range(len(inputs))
        ),
    )


# Parts of the inputs, outputs and input gradients, by rank.
_Defined = tuple[list[Parts], list[Parts], list[Parts]]


def _exchange(sizes: Sizes, source: int) -> _Defined:
    """Define all_to_all: rank s gets part s of every rank, in rank order.

    The backward transposes the sizes.
    """
    ranks = range(len(sizes))
    inputs = _number_all(sizes)
    outputs = _transpose(inputs)
    gradients = _number_all([[sizes[sender][rank] for sender in ranks] for rank in ranks])
    return inputs, outputs, _transpose(gradients)


def _gather(sizes: Sizes, source: int) -> _Defined:
    """Define all_gather. The gradient of a part is the sum of all ranks' slices of it."""
    (row,) = sizes
    inputs = _number_all([[size] for size in row])
    outputs = [tuple(parts[0] for parts in inputs)] * len(row)
    gradients = _number_all([row] * len(row))
    return inputs, outputs, [(total,) for total in _sum(gradients)]


def _scatter_sum(sizes: Sizes, source: int) -> _Defined:
    """Define reduce_scatter: rank s gets the sum of all parts s.

    Its gradient goes to part s of every rank.
    """
    (row,) = sizes
    inputs = _number_all([row] * len(row))
    outputs: list[Parts] = [(total,) for total in _sum(inputs)]
    gradients = _number_all([[size] for size in row])
    return inputs, outputs, [tuple(parts[0] for parts in gradients)] * len(row)


def _sum_all(sizes: Sizes, source: int) -> _Defined:
    """Define all_reduce. Each input gradient is the sum of all output gradients."""
    (row,) = sizes
    inputs = _number_all([[size] for size in row])
    totals = tuple(_sum(inputs))
    return inputs, [totals] * len(row), [totals] * len(row)


def _copy(sizes: Sizes, source: int) -> _Defined:
    """Define broadcast. The gradient of the source is the sum of all; the other inputs are unused."""
    (row,) = sizes
    inputs = _number_all([[size] for size in row])
    total = tuple(_sum(inputs))
    unused = (TensorSpan(origin=None, values=(0.0,) * row[0]),)
    return inputs, [inputs[source]] * len(row), [total if r == source else unused for r in range(len(row))]


_RULES: Mapping[CollectiveName, Callable[[Sizes, int], _Defined]] = {
    CollectiveName.ALL_TO_ALL: _exchange,
    CollectiveName.ALL_GATHER: _gather,
    CollectiveName.REDUCE_SCATTER: _scatter_sum,
    CollectiveName.ALL_REDUCE: _sum_all,
    CollectiveName.BROADCAST: _copy,
}


def _number_all(sizes: Sizes) -> list[Parts]:
    """Return the numbered parts of every rank. Rank r has parts with the sizes `sizes[r]`."""
    step = _choose_step(max(map(sum, sizes)))
    return [_number(rank, row, step) for rank, row in enumerate(sizes)]


def _number(rank: int, sizes: Sequence[int], step: int) -> Parts:
    ends = accumulate(sizes, initial=0)
    return tuple(
        TensorSpan(origin=rank, values=tuple(float(step * rank + i) for i in range(start, stop)))
        for start, stop in pairwise(ends)
    )


def _step(parts: Sequence[Parts]) -> int:
    return _choose_step(max(len(flatten(each)) for each in parts))


def _choose_step(count: int) -> int:
    """Return the smallest power of ten, at least 100, that is larger than any index below `count`."""
    return int(10 ** max(2, len(str(max(count - 1, 0)))))


def _transpose(parts: Sequence[Parts]) -> list[Parts]:
    return [tuple(each[rank] for each in parts) for rank in range(len(parts))]


def _sum(parts: Sequence[Parts]) -> list[TensorSpan]:
    """Return, for each position, the elementwise sum of the parts of all ranks."""
    return [
        TensorSpan(origin=None, values=tuple(map(sum, zip(*(part.values for part in same), strict=True))))
        for same in zip(*parts, strict=True)
    ]
