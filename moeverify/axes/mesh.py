"""The device mesh of a layout as plain arithmetic: axes, coordinates and groups, without torch.

The same ranks are looked at through several views, each a factorization of the world in row-major order. The
descriptors in `moeverify.axes` say which view an axis is a factor of:

- `data`:   pp, dp_replicate, dp_shard, cp, tp      which part of the batch a rank sees
- `dense`:  pp, dp_replicate, fsdp, tp              how parameters outside the experts are stored;
                                                    fsdp = dp_shard * cp
- `sparse`: pp, dp_replicate, efsdp, ep, etp        how expert parameters are stored; ep and etp borrow ranks
                                                    from dp_shard, cp and tp
- `loss`:   pp, loss, tp                            loss = dp_replicate * dp_shard * cp, the ranks whose
                                                    losses add up to the loss of the global batch

With `data_parallel: ddp` nothing is sharded over the data ranks, so ep borrows from dp_replicate: the sparse
view is then pp, edp, ep, etp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from moeverify.axes.axis import VIEWS
from moeverify.axes.registry import DEGREES, list_axes
from moeverify.case.schema import Layout


@dataclass(frozen=True)
class View:
    """A factorization of the world into named axes, the last one varying fastest."""

    axes: Mapping[str, int]

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return math.prod(self.axes.values())

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank on every axis."""
        found: dict[str, int] = {}
        for axis in reversed(list(self.axes)):
            rank, found[axis] = divmod(rank, self.axes[axis])
        return {axis: found[axis] for axis in self.axes}

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the groups of ranks that differ only in their coordinates on the given axes."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            coordinates = self.coordinates(rank)
            fixed = tuple(value for axis, value in coordinates.items() if axis not in axes)
            groups.setdefault(fixed, []).append(rank)
        return list(groups.values())


@dataclass(frozen=True)
class MeshPlan:
    """All views of one layout."""

    data: View
    dense: View
    sparse: View
    loss: View

    @classmethod
    def of(cls, layout: Layout) -> MeshPlan:
        """Return the views of a layout whose degrees have been validated."""
        return cls(**{name: View(list_axes(layout, name)) for name in VIEWS})

    @property
    def views(self) -> tuple[View, ...]:
        """Return all views, that of the data first."""
        return self.data, self.dense, self.sparse, self.loss

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.data.world_size

    def view_of(self, axis: str) -> View:
        """Return the first view that an axis is a factor of.

        Raises: KeyError where no view has it.
        """
        for view in self.views:
            if axis in view.axes:
                return view
        raise KeyError(axis)

    def row_share(self, rank: int) -> int:
        """Return which share of the rows of the global batch a rank sees, counted in the order of the mesh."""
        place, share = self.data.coordinates(rank), 0
        for axis in DEGREES:
            if axis.batch_dim == "rows":
                share = share * self.data.axes[axis.name] + place[axis.name]
        return share

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the rank's coordinates on every axis of more than one rank that a field of the layout sets."""
        both = self.data.coordinates(rank) | self.sparse.coordinates(rank)
        sizes = {**self.data.axes, **self.sparse.axes}
        names = {axis.name for axis in DEGREES}
        return {axis: value for axis, value in both.items() if axis in names and sizes[axis] > 1}
