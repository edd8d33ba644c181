"""A region of a logical tensor as boxes: what torch's distributed checkpoint can save and load.

A box is an offset and a size for each dim. A rank's region may be several: indices with gaps (zigzag, experts
placed by hand) give one box for each run, a run of the flattened tensor (FSDP1) its first row's rest, the
whole rows, and the last row's beginning, dim by dim.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from moeverify.layout.region import Indices, Region


@dataclass(frozen=True)
class Hyperrect:
    """A box of a logical tensor: per dim where it begins and how far it goes."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)


def split_region(region: Region, local: Tensor) -> Iterator[tuple[Hyperrect, Tensor]]:
    """Yield the boxes of a region, none of them empty, each with its view of the local tensor.

    Shapes: `local` has `region.local_shape`, or is a flat run in any shape without gaps.

    Raises: RuntimeError where a run's local tensor is not contiguous, since a load would then write to a copy.
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
    """Yield the boxes of elements [start, stop) of a flattened tensor, in their order."""
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
