"""The device meshes of a layout, made by torch from the views of its mesh plan."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moeverify.case.schema import Layout
from moeverify.layout.mesh import MeshPlan, View


@dataclass(frozen=True)
class Meshes:
    """One mesh for each view of the layout (see `moeverify.layout.mesh`)."""

    plan: MeshPlan
    data: DeviceMesh
    dense: DeviceMesh
    sparse: DeviceMesh
    loss: DeviceMesh

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

    return Meshes(plan, build(plan.data), build(plan.dense), build(plan.sparse), build(plan.loss))
