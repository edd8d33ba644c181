"""Process groups by their role in training. Modules keep a `ParallelDims`; on one device all groups have one rank."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, eq=False)
class Group:
    pg: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1

    @property
    def alone(self) -> bool:
        return self.size == 1

    def __deepcopy__(self, memo):
        return self


@dataclass(frozen=True, eq=False)
class ParallelDims:
    """`batch` has the ranks that read different tokens, `ep` those with different experts, and `expert_dp`
    those that have the same experts and read different tokens."""

    batch: Group = field(default_factory=Group)
    tp: Group = field(default_factory=Group)
    cp: Group = field(default_factory=Group)
    pp: Group = field(default_factory=Group)
    ep: Group = field(default_factory=Group)
    expert_dp: Group = field(default_factory=Group)
    flag: str = ""

    def has(self, flag: str) -> bool:
        return self.flag == flag

    def __deepcopy__(self, memo):
        return self


def group_of(mesh: DeviceMesh, *names: str) -> Group:
    """Return this rank's group over some axes of the mesh; axes of one rank do not count."""
    names = tuple(name for name in names if mesh[name].size() > 1)
    if not names:
        return Group()
    part = mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))
    return Group(part.get_group(), part.get_local_rank(), part.size())


def install(model: nn.Module, dims: ParallelDims) -> nn.Module:
    for module in model.modules():
        module.dims = dims
    return model
