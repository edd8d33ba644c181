"""Device meshes of a layout, created by torch from the views of its mesh plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from moeverify.cases.axes.mesh import MeshPlan, View
from moeverify.cases.axes.registry import EXPERT_AXES
from moeverify.cases.axes.stages import end_ranks
from moeverify.cases.schema import Layout
from moeverify.parallel.holder_groups import HolderGroups


@dataclass(frozen=True)
class Meshes:
    """One mesh for each view of the layout (see `moeverify.cases.axes.mesh`).

    `holders` has the groups of ranks that hold the same experts under a placement. `ends` is the group of
    the ranks with the first and the last stage of this rank's pipeline. It is None when this rank is
    neither, or when one rank has both stages.
    """

    plan: MeshPlan
    data: DeviceMesh
    dense: DeviceMesh
    sparse: DeviceMesh
    loss: DeviceMesh
    holders: HolderGroups
    ends: ProcessGroup | None = None

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis of any view."""
        return self.plan.view_of(axis).axes[axis]

    def group(self, axis: str) -> ProcessGroup:
        """Return this rank's process group along an axis of any view."""
        return self.mesh_of(axis).get_group(axis)

    def coordinate(self, axis: str) -> int:
        """Return this rank's coordinate on an axis of any view."""
        return self.mesh_of(axis).get_local_rank(axis)

    def mesh_of(self, axis: str) -> DeviceMesh:
        """Return the mesh of the first view that has an axis.

        Raises: KeyError when no view has it.
        """
        for mesh in (self.data, self.dense, self.sparse, self.loss):
            if axis in (mesh.mesh_dim_names or ()):
                return mesh
        raise KeyError(axis)


def build_meshes(layout: Layout, device_type: str) -> Meshes:
    """Return the meshes of a layout. Collective: all ranks of the default process group.

    Every group costs each of its ranks a thread and a connection to every other rank, so equal groups are
    shared. These are groups of a single rank, the default group for axes with all ranks, and axes outside
    the experts.
    """
    plan = MeshPlan.of(layout)
    made: dict[object, ProcessGroup] = {}

    def build(view: View) -> DeviceMesh:
        groups = [_find_group(view, axis, made) for axis in view.axes]
        # Row-major: the last axis varies fastest, as in `View.coordinates`.
        ranks = torch.arange(view.world_size).reshape(tuple(view.axes.values()))
        return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=tuple(view.axes))

    return Meshes(
        plan,
        build(plan.data),
        build(plan.dense),
        build(plan.sparse),
        build(plan.loss),
        HolderGroups(plan.sparse),
        _group_ends(layout, plan) if layout.pp > 1 else None,
    )


def _find_group(view: View, axis: str, made: dict[object, ProcessGroup]) -> ProcessGroup:
    """Return this rank's group along an axis, reusing a group of `made` with the same ranks and role.

    Axes of experts keep separate groups. Their collectives run concurrently with those of the dense layers,
    and would serialize within a shared group.
    """
    ranks = next(group for group in view.groups(axis) if dist.get_rank() in group)
    if len(ranks) == dist.get_world_size():
        world = dist.group.WORLD
        assert world is not None
        return world
    apart = axis if axis in EXPERT_AXES and len(ranks) > 1 else ""
    key = (apart, tuple(ranks))
    if key not in made:
        # With local synchronization a rank creates its group without waiting for ranks outside it.
        made[key] = _make_group(ranks, f"mesh_{axis}" if len(ranks) > 1 else "one rank")
    return made[key]


def _make_group(ranks: Sequence[int], description: str) -> ProcessGroup:
    group = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=description)
    assert isinstance(group, ProcessGroup)
    return group


def _group_ends(layout: Layout, plan: MeshPlan) -> ProcessGroup | None:
    """Return the group of the first and last stage, or None if one rank has both or this rank has neither.

    Collective: all ranks of the default process group.
    """
    first, last = end_ranks(layout)
    mine: ProcessGroup | None = None
    for ranks in plan.data.groups("pp"):
        if first == last:
            continue
        ends = [ranks[first], ranks[last]]
        # Without local synchronization: all ranks create every pipeline's group, in the same order.
        group = dist.new_group(ends)
        if dist.get_rank() in ends:
            mine = group
    return mine
