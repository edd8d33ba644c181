"""Parts of a tensor that a rank should hold, inferred from the indices that it holds of related tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeverify.explain.program import Program

_MOST_ROWS = 16
_AGREED = 0.8
"""Minimum fraction of elements that agree on the place of a part."""


@dataclass(frozen=True)
class Cut:
    """Indices along a dimension with `size` elements.

    `dim` is the dimension in which they were seen, -1 for the batch.
    """

    size: int
    index: Tensor
    dim: int = -1


def list_batch_cuts(one: Program, program: Program, occurrence: int) -> Iterator[Cut]:
    """Yield the batch rows, positions and tokens that a rank has in one of its micro-batches."""
    if not one.shares or not program.shares:
        return
    all_rows = sorted({row for rows, _ in one.shares for row in rows})
    all_positions = list(one.shares[0][1])
    rows, positions = (torch.tensor(list(each)) for each in program.shares[occurrence % len(program.shares)])
    yield Cut(len(all_rows), rows)
    yield Cut(len(all_positions), positions)
    yield Cut(
        len(all_rows) * len(all_positions), (rows[:, None] * len(all_positions) + positions).reshape(-1)
    )


def list_cuts(places: Tensor, shape: Sequence[int]) -> Iterator[Cut]:
    """Yield the indices along each dimension of a part of a tensor with this shape, if the part is a block.

    `places` has the flat index of each element in the tensor, -1 for padding, with the shape of the part.
    """
    if places.ndim != len(shape) or not places.numel():
        return
    found, left = [], places.clamp(min=0)
    for dim in reversed(range(len(shape))):
        found.append(torch.where(places >= 0, left % shape[dim], -1))
        left = left // shape[dim]
    for dim, index in enumerate(reversed(found)):
        along = index.movedim(dim, 0).reshape(index.shape[dim], -1)
        common = _most_common(along)
        # Equal elements are indistinguishable, so a few may be found at other places.
        agreed = (along == common[:, None]) | (along < 0)
        if bool((common >= 0).all()) and float(agreed.double().mean()) > _AGREED:
            yield Cut(shape[dim], common, dim)


def _most_common(rows: Tensor) -> Tensor:
    """Return the most common index in each row, -1 for rows of padding. Shapes: (n, m), (n,)."""
    padding = -1 - torch.arange(rows.shape[1])  # each occurs once
    common = torch.where(rows < 0, padding, rows).mode(1).values
    largest = rows.amax(1)
    smallest = torch.where(rows < 0, largest[:, None], rows).amin(1)
    return torch.where(common < 0, smallest, common)


def take(whole: Tensor, shape: Sequence[int], cuts: Sequence[Cut]) -> Tensor | None:
    """Return the part of a tensor with this shape, cut like related tensors; None if no cut fits."""
    if whole.ndim != len(shape):
        return whole.reshape(tuple(shape)) if whole.numel() == math.prod(shape) else None
    for dim, size in enumerate(shape):
        if whole.shape[dim] == size:
            continue
        fitting = [each for each in cuts if each.size == whole.shape[dim] and len(each.index) == size]
        fitting += [
            wide
            for each in cuts
            if (wide := _widen(each, whole.shape[dim])) is not None and len(wide.index) == size
        ]
        if not fitting:
            return None
        best = min(fitting, key=lambda each: each.dim not in (-1, dim))
        whole = whole.index_select(dim, best.index)
    return whole


def _widen(cut: Cut, size: int) -> Cut | None:
    """Return a batch cut for a dimension in which the batch is flattened with later dimensions."""
    if cut.dim >= 0 or size == cut.size or size % cut.size:
        return None
    inner = size // cut.size
    return Cut(size, (cut.index[:, None] * inner + torch.arange(inner)).reshape(-1), cut.dim)


def list_rows(index: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the first indices in dim 0 of elements, given by flat index, that are some whole slices of a tensor."""
    width = math.prod(shape[1:])
    if len(shape) < 2 or not width:
        return ()
    rows, counts = torch.unique(index // width, return_counts=True)
    is_whole = bool((counts == width).all()) and len(rows) < shape[0]
    return tuple(rows[:_MOST_ROWS].tolist()) if is_whole else ()


def fit_region(index: Tensor, size: int) -> Tensor | None:
    """Return the affine index map that most elements of `index` follow; None if it leaves the tensor."""
    if index.ndim == 0 or not index.numel():
        return None
    steps = [
        0 if index.shape[dim] == 1 else int(index.diff(dim=dim).reshape(-1).mode().values)
        for dim in range(index.ndim)
    ]
    along = [
        (torch.arange(index.shape[dim]) * step).reshape(
            [-1 if each == dim else 1 for each in range(index.ndim)]
        )
        for dim, step in enumerate(steps)
    ]
    total: Tensor = sum(along[1:], along[0])
    start = int((index - total).reshape(-1).mode().values)
    fitted = (total + start).expand(index.shape)
    return fitted if bool(((fitted >= 0) & (fitted < size)).all()) else None
