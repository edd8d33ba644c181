"""Named process groups on top of one `DeviceMesh`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Axis:
    """The ranks that this rank works with along some dims of the mesh."""

    size: int = 1
    rank: int = 0
    group: Any = None

    def __deepcopy__(self, memo):
        return self


FLAT = {
    "batch": ("dp_replicate", "dp_shard"),  # ranks with other rows
    "loss": ("dp_replicate", "dp_shard", "cp"),  # ranks with other target tokens
    "fsdp": ("dp_shard", "cp"),  # ranks that share one copy of the dense weights
    "ep": ("dp_shard", "tp"),  # ranks that share one copy of the experts
    "edp": ("dp_replicate", "cp"),  # ranks with the same experts
}


class ParallelDims:
    """All axes of a run; without a mesh each has one rank."""

    def __init__(self, mesh: DeviceMesh | None = None, *, drill: str = "", **options: Any) -> None:
        self.mesh, self.drill, self.options = mesh, drill, options
        self._axes: dict[str, Axis] = {}
        self._meshes: dict[str, DeviceMesh] = {}
        if mesh is None:
            return
        for name in ("dp_replicate", "dp_shard", "cp"):
            self._add(name, mesh[name])
        self._add("pp" if options.get("pipeline") else "tp", mesh["tp"])
        for name, members in FLAT.items():
            members = [member for member in members if member in self._meshes]
            wide = [member for member in members if mesh[member].size() > 1] or [members[0]]
            flat = mesh[wide[0]] if len(wide) == 1 else mesh[tuple(wide)]._flatten("_".join(wide))
            self._add(name, flat)

    def _add(self, name: str, mesh: DeviceMesh) -> None:
        self._meshes[name] = mesh
        if mesh.size() > 1:
            self._axes[name] = Axis(mesh.size(), mesh.get_local_rank(), mesh.get_group())

    def __deepcopy__(self, memo):
        return self

    def __getitem__(self, name: str) -> Axis:
        return self._axes.get(name, Axis())

    def submesh(self, name: str) -> DeviceMesh:
        return self._meshes[name]

    def on(self, name: str) -> bool:
        return self.drill == name

    def option(self, name: str, default: Any = None) -> Any:
        return self.options.get(name, default)


SOLO = ParallelDims()
