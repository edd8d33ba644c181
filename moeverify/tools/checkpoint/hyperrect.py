"""Decomposition of a region of a logical tensor into boxes, as torch's distributed checkpoint needs them.

A box has an offset and a size for each dim. A region may need several boxes. Indices with gaps (zigzag,
placed experts) need one box for each run of consecutive indices. A range of the flattened tensor (FSDP1)
needs boxes for the rest of its first row, its whole rows, and the start of its last row, recursively for
each dim.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from moeverify.parallel.regions.region import Indices, Region


@dataclass(frozen=True)
class Hyperrect:
    """A box of a logical tensor: per dim its offset and its size."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)


def split_region(region: Region, local: Tensor) -> Iterator[tuple[Hyperrect, Tensor]]:
    """Yield the non-empty boxes of a region, each with its view of the local tensor.

    Shapes: `local` has `region.local_shape`; for a flat range it may be contiguous in any shape.

    Raises: RuntimeError when the local tensor of a flat range is not contiguous, because a load would write
    to a copy.
    """
    if region.numel == 0:
        return
    if region.flat is not None:
        flat, position = local.view(-1), 0
        for box in _split_run(region.shape, region.flat.start, region.flat.stop):
            yield box, flat[position : position + box.numel].view(box.shape)
            position += box.numel
        return
    for parts in itertools.product(*(list(_split_indices(indices)) for indices in region.dims)):
        view = local
        for dim, (_, place, size) in enumerate(parts):
            view = view.narrow(dim, place, size)
        yield Hyperrect(tuple(part[0] for part in parts), tuple(part[2] for part in parts)), view


def _split_indices(indices: Indices) -> Iterator[tuple[int, int, int]]:
    """Yield (first global index, its local position, length) of each run of consecutive indices."""
    if isinstance(indices, range):
        yield indices.start, 0, len(indices)
        return
    place = 0
    for position in range(1, len(indices) + 1):
        if position == len(indices) or indices[position] != indices[position - 1] + 1:
            yield indices[place], place, position - place
            place = position


def _split_run(shape: Sequence[int], start: int, stop: int) -> Iterator[Hyperrect]:
    """Yield the boxes of elements [start, stop) of a flattened tensor, in order."""
    if not shape:
        yield Hyperrect((), ())
        return
    if len(shape) == 1:
        yield Hyperrect((start,), (stop - start,))
        return
    inner = math.prod(shape[1:])
    while start < stop:
        row, within = divmod(start, inner)
        if within or stop - start < inner:
            end = min(stop, (row + 1) * inner)
            for box in _split_run(shape[1:], within, end - row * inner):
                yield Hyperrect((row, *box.offset), (1, *box.shape))
        else:
            end = stop // inner * inner
            yield Hyperrect((row, *[0] * (len(shape) - 1)), (end // inner - row, *shape[1:]))
        start = end
