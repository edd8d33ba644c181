"""The device mesh of a layout as plain arithmetic: axes, coordinates and groups, without torch.

The same ranks are looked at through several views, each a factorization of the world in row-major order:

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

from moeverify.case.schema import Layout

EXPERT_AXES = ("efsdp", "edp", "ep", "etp")
"""Axes of the sparse view alone: they place experts, and the tokens that travel to them."""


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
        data_ranks = layout.dp_replicate * layout.dp_shard * layout.cp
        etp = layout.expert_tp
        data = {
            "pp": layout.pp,
            "dp_replicate": layout.dp_replicate,
            "dp_shard": layout.dp_shard,
            "cp": layout.cp,
            "tp": layout.tp,
        }
        dense = {
            "pp": layout.pp,
            "dp_replicate": layout.dp_replicate,
            "fsdp": layout.dp_shard * layout.cp,
            "tp": layout.tp,
        }
        if layout.data_parallel == "ddp":
            sparse = {
                "pp": layout.pp,
                "edp": data_ranks * layout.tp // (layout.ep * etp),
                "ep": layout.ep,
                "etp": etp,
            }
        else:
            sparse = {
                "pp": layout.pp,
                "dp_replicate": layout.dp_replicate,
                "efsdp": layout.dp_shard * layout.cp * layout.tp // (layout.ep * etp),
                "ep": layout.ep,
                "etp": etp,
            }
        loss = {"pp": layout.pp, "loss": data_ranks, "tp": layout.tp}
        return cls(View(data), View(dense), View(sparse), View(loss))

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.data.world_size

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the rank's coordinates on every axis of more than one rank, of the data and expert axes."""
        both = self.data.coordinates(rank) | {
            axis: value for axis, value in self.sparse.coordinates(rank).items() if axis in {"ep", "etp"}
        }
        sizes = {**self.data.axes, **self.sparse.axes}
        return {axis: value for axis, value in both.items() if sizes[axis] > 1}
