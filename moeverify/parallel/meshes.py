"""The device meshes of a layout, made by torch from the views of its mesh plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moeverify.case.schema import Layout
from moeverify.layout.mesh import MeshPlan, View
from moeverify.layout.stages import end_ranks


@dataclass(frozen=True)
class Meshes:
    """One mesh for each view of the layout (see `moeverify.layout.mesh`).

    `ends` has the ranks with the first and the last pipeline stage of this rank's pipeline, if this rank is one
    of two such.
    """

    plan: MeshPlan
    data: DeviceMesh
    dense: DeviceMesh
    sparse: DeviceMesh
    loss: DeviceMesh
    ends: ProcessGroup | None = None

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis of any view."""
        for view in (self.plan.data, self.plan.dense, self.plan.sparse, self.plan.loss):
            if axis in view.axes:
                return view.axes[axis]
        raise KeyError(axis)

    def group(self, axis: str) -> ProcessGroup:
        """Return this rank's process group along an axis of any view."""
        for mesh in (self.data, self.dense, self.sparse, self.loss):
            if axis in (mesh.mesh_dim_names or ()):
                return mesh.get_group(axis)
        raise KeyError(axis)

    def coordinate(self, axis: str) -> int:
        """Return this rank's coordinate on an axis of any view."""
        for mesh in (self.data, self.dense, self.sparse, self.loss):
            if axis in (mesh.mesh_dim_names or ()):
                return mesh.get_local_rank(axis)
        raise KeyError(axis)


def build_meshes(layout: Layout, device_type: str) -> Meshes:
    """Return the meshes of a layout. Collective: all ranks of the default process group."""
    plan = MeshPlan.of(layout)

    def build(view: View) -> DeviceMesh:
        return init_device_mesh(device_type, tuple(view.axes.values()), mesh_dim_names=tuple(view.axes))

    return Meshes(
        plan,
        build(plan.data),
        build(plan.dense),
        build(plan.sparse),
        build(plan.loss),
        _group_ends(layout, plan) if layout.pp > 1 else None,
    )


def _group_ends(layout: Layout, plan: MeshPlan) -> ProcessGroup | None:
    """Return the group of the first and the last stage, None where one rank has both or this rank neither.

    Collective: all ranks of the default process group.
    """
    first, last = end_ranks(layout)
    mine: ProcessGroup | None = None
    for ranks in plan.data.groups("pp"):
        if first == last:
            continue
        ends = [ranks[first], ranks[last]]
        group = dist.new_group(ends)
        if dist.get_rank() in ends:
            mine = group
    return mine
