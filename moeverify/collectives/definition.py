"""The definitions of collectives, element by element: `moeverify comm` holds the real ones against them. No torch.

Element i of rank r has the value `step * r + i`, so that every number says where it comes from; `step` is a power of
ten above every i. Gradients of outputs are numbered in the same way.

The backward is that of the sum of all ranks' losses. With y = A x over the elements of all ranks it is A transposed:
an exchange goes back, a gather becomes a sum of which each rank gets its slice, and what was summed is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

from moeverify.results.collective_name import Collective
from moeverify.results.collective_run import Part, Parts, RankTransfer, Transfer, flatten

Sizes = Sequence[Sequence[int]]
"""Sizes[r][s]: how many elements the part has that rank r has for rank s."""

TAKES_SPLITS: Mapping[Collective, int] = {
    Collective.ALL_TO_ALL: 2,
    Collective.ALL_GATHER: 1,
    Collective.REDUCE_SCATTER: 1,
}
"""Whose parts may differ in size: 2 where each pair of ranks has a size of its own, 1 where each rank has one."""


def define_transfer(collective: Collective, sizes: Sizes, source: int = 0) -> Transfer:
    """Return what each rank gives and should get.

    Shapes: all_to_all has `sizes` (n, n), row r of what rank r sends; the others have one row: all_gather and
    reduce_scatter (1, n) with the part of each rank, all_reduce and broadcast (1, n) with n times the same size.
    """
    inputs, outputs, back = _RULES[collective](sizes, source)
    padded = collective in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER) and len(set(sizes[0])) > 1
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


_Defined = tuple[list[Parts], list[Parts], list[Parts]]
"""The parts of inputs, outputs and gradients of inputs, by rank."""


def _exchange(sizes: Sizes, source: int) -> _Defined:
    """Rank s gets part s of every rank, in the order of the ranks; the way back has the sizes exchanged."""
    ranks = range(len(sizes))
    inputs = _number_all(sizes)
    outputs = _transpose(inputs)
    gradients = _number_all([[sizes[sender][rank] for sender in ranks] for rank in ranks])
    return inputs, outputs, _transpose(gradients)


def _gather(sizes: Sizes, source: int) -> _Defined:
    """Every rank gets the parts of all; a part's gradient is the sum of the slices that all ranks have of it."""
    (row,) = sizes
    inputs = _number_all([[size] for size in row])
    outputs = [tuple(parts[0] for parts in inputs)] * len(row)
    gradients = _number_all([row] * len(row))
    return inputs, outputs, [(total,) for total in _sum(gradients)]


def _scatter_sum(sizes: Sizes, source: int) -> _Defined:
    """Rank s gets the sum of all parts s; every rank's gradient of part s is that of rank s, which has the sum."""
    (row,) = sizes
    inputs = _number_all([row] * len(row))
    outputs: list[Parts] = [(total,) for total in _sum(inputs)]
    gradients = _number_all([[size] for size in row])
    return inputs, outputs, [tuple(parts[0] for parts in gradients)] * len(row)


def _sum_all(sizes: Sizes, source: int) -> _Defined:
    """Every rank gets the sum; each rank's gradient is the sum of all, since its input is in the sum of each."""
    (row,) = sizes
    inputs = _number_all([[size] for size in row])
    totals = tuple(_sum(inputs))
    return inputs, [totals] * len(row), [totals] * len(row)


def _copy(sizes: Sizes, source: int) -> _Defined:
    """Every rank gets the input of the source, whose gradient is the sum of all; nobody uses the other inputs."""
    (row,) = sizes
    inputs = _number_all([[size] for size in row])
    total = tuple(_sum(inputs))
    unused = (Part(origin=None, values=(0.0,) * row[0]),)
    return inputs, [inputs[source]] * len(row), [total if r == source else unused for r in range(len(row))]


_RULES: Mapping[Collective, Callable[[Sizes, int], _Defined]] = {
    Collective.ALL_TO_ALL: _exchange,
    Collective.ALL_GATHER: _gather,
    Collective.REDUCE_SCATTER: _scatter_sum,
    Collective.ALL_REDUCE: _sum_all,
    Collective.BROADCAST: _copy,
}


def _number_all(sizes: Sizes) -> list[Parts]:
    """Return the numbered parts of every rank, of which rank r has those of sizes[r]."""
    step = _choose_step(max(map(sum, sizes)))
    return [_number(rank, row, step) for rank, row in enumerate(sizes)]


def _number(rank: int, sizes: Sequence[int], step: int) -> Parts:
    ends = accumulate(sizes, initial=0)
    return tuple(
        Part(origin=rank, values=tuple(float(step * rank + i) for i in range(start, stop)))
        for start, stop in pairwise(ends)
    )


def _step(parts: Sequence[Parts]) -> int:
    return _choose_step(max(len(flatten(each)) for each in parts))


def _choose_step(count: int) -> int:
    """Return the power of ten, at least 100, that no index of so many elements reaches."""
    return int(10 ** max(2, len(str(max(count - 1, 0)))))


def _transpose(parts: Sequence[Parts]) -> list[Parts]:
    return [tuple(each[rank] for each in parts) for rank in range(len(parts))]


def _sum(parts: Sequence[Parts]) -> list[Part]:
    """Return, for each place, the elementwise sum of the parts that all ranks have there."""
    return [
        Part(origin=None, values=tuple(map(sum, zip(*(part.values for part in same), strict=True))))
        for same in zip(*parts, strict=True)
    ]
