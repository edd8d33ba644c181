"""The device mesh of a layout as plain arithmetic: axes, coordinates and groups, without torch.

A layout has several views. Each view is a factorization of the same world in row-major order. The
descriptors in `moeverify.cases.axes` list the views of each axis:

- `data`: pp, dp_replicate, dp_shard, cp, tp. It defines the part of the batch that a rank processes.
- `dense`: pp, dp_replicate, fsdp, tp, with fsdp = dp_shard * cp. It defines the storage of parameters
  outside the experts.
- `sparse`: pp, dp_replicate, efsdp, ep, etp. It defines the storage of expert parameters; ep and etp borrow
  ranks from dp_shard, cp and tp.
- `loss`: pp, loss, tp, with loss = dp_replicate * dp_shard * cp. The losses of these ranks add up to the
  loss of the global batch.

With `data_parallel: ddp` nothing is sharded over the data ranks, so ep borrows from dp_replicate. The
sparse view is then pp, edp, ep, etp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from moeverify.cases.axes.axis import VIEWS
from moeverify.cases.axes.registry import DEGREES, list_axes
from moeverify.cases.schema import Layout


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
        """Return all views, the data view first."""
        return self.data, self.dense, self.sparse, self.loss

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.data.world_size

    def view_of(self, axis: str) -> View:
        """Return the first view that contains an axis.

        Raises: KeyError when no view contains it.
        """
        for view in self.views:
            if axis in view.axes:
                return view
        raise KeyError(axis)

    def row_share(self, rank: int) -> int:
        """Return the index of a rank's share of the rows of the global batch, in mesh order."""
        place, share = self.data.coordinates(rank), 0
        for axis in DEGREES:
            if axis.batch_dim == "rows":
                share = share * self.data.axes[axis.name] + place[axis.name]
        return share

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinates on every axis that a layout field sets and that has several ranks."""
        both = self.data.coordinates(rank) | self.sparse.coordinates(rank)
        sizes = {**self.data.axes, **self.sparse.axes}
        names = {axis.name for axis in DEGREES}
        return {axis: value for axis, value in both.items() if axis in names and sizes[axis] > 1}
