"""Groups of ranks, by the mesh axes over which they extend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn


@dataclass(frozen=True, eq=False)
class Group:
    size: int = 1
    index: int = 0
    pg: Any = None

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.size - 1

    def rank_at(self, step: int) -> int:
        """Return the global rank of the member that is `step` places on, around the ring."""
        return dist.get_global_rank(self.pg, (self.index + step) % self.size)

    def __deepcopy__(self, memo):
        return self


NOBODY = Group()
DATA = ("dp_replicate", "dp_shard")


class Topology:
    """A registry of groups. `mode` is a variant of the code that someone tries."""

    def __init__(self, mesh=None, *, mode="", sp=False, ep="dp_shard", stages=False) -> None:
        self.mesh, self.mode, self.sp, self.ep_axis = mesh, mode, sp, ep
        self._known: dict[tuple[str, ...], Group] = {}
        channels = self.over("tp")
        self.tp = NOBODY if stages else channels  # other channels of the same tokens
        self.pp = channels if stages else NOBODY  # other layers
        self.dp = self.over(*DATA)  # other rows
        self.cp = self.over("cp")  # other positions of the same rows
        self.tokens = self.over(*DATA, "cp")  # other tokens
        self.ep = self.over(ep)  # other experts
        self.twins = self.over(*(axis for axis in (*DATA, "cp") if axis != ep))  # same experts, other tokens

    def over(self, *axes: str) -> Group:
        if self.mesh is None:
            return NOBODY
        axes = tuple(axis for axis in axes if self.mesh[axis].size() > 1)
        if not axes:
            return NOBODY
        if axes not in self._known:
            sub = self.mesh[axes[0]] if len(axes) == 1 else self.mesh[axes]._flatten("_".join(axes))
            self._known[axes] = Group(sub.size(), sub.get_local_rank(), sub.get_group())
        return self._known[axes]

    @property
    def ep_on_tp(self) -> bool:
        """Return whether ranks of tp have whole experts, to which each sends its own tokens."""
        return self.ep_axis == "tp" and self.tp.size > 1

    @property
    def routed(self) -> Group:
        """Return the ranks that route other tokens."""
        return self.over(*DATA, "cp", "tp") if self.ep_on_tp else self.tokens

    @property
    def positions(self) -> Group:
        """Return the ranks that route other positions of the same rows."""
        return self.over("cp", "tp") if self.ep_on_tp else self.cp

    def trial(self, name: str) -> bool:
        return self.mode == name

    def __deepcopy__(self, memo):
        return self


SINGLE = Topology()


class Part(nn.Module):
    """A module that can ask for the groups."""

    topo: Topology = SINGLE


def install(model: nn.Module, topo: Topology) -> None:
    for module in model.modules():
        if isinstance(module, Part):
            module.topo = topo
