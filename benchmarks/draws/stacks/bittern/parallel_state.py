"""Process groups by role, and the run-wide values that layers read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

ROLES = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp_replicate", "dp_shard"),  # ranks with other rows
    "data": ("dp_replicate", "dp_shard", "cp"),  # ranks with other tokens
    "ep": ("dp_shard", "tp"),  # ranks that share one set of experts
    "edp": ("dp_replicate", "cp"),  # ranks with the same experts
    "seq": ("cp", "tp"),  # ranks that share the tokens of a row
    "world": ("dp_replicate", "dp_shard", "cp", "tp"),
}


@dataclass(eq=False)
class Group:
    size: int = 1
    rank: int = 0
    pg: Any = None
    mode: str = ""

    def global_rank(self, rank: int) -> int:
        return dist.get_global_rank(self.pg, rank % self.size)

    def __deepcopy__(self, memo):
        return self


@dataclass(eq=False)
class ParallelState:
    """`mode` selects code under trial. The trainer sets `loss_scale`, by which the router's losses are scaled,
    and `num_valid`, the number of valid targets of the step."""

    groups: dict[str, Group] = field(default_factory=dict)
    sequence_parallel: bool = False
    dispatch: str = "sized"
    mode: str = ""
    loss_scale: Any = 1.0
    num_valid: Any = 1.0

    def __getattr__(self, name: str) -> Group:
        if name not in ROLES:
            raise AttributeError(name)
        return self.groups.get(name, SINGLE)

    def __deepcopy__(self, memo):
        return self


SINGLE = Group()


def make_state(mesh, *, mode: str = "", sp: bool = False, dispatch: str = "sized") -> ParallelState:
    made: dict[tuple[str, ...], Group] = {}
    groups = {}
    for role, members in ROLES.items():
        members = tuple(name for name in members if mesh[name].size() > 1)
        if members not in made:
            if not members:
                made[members] = Group(mode=mode)
                groups[role] = made[members]
                continue
            sub = mesh[members[0]] if len(members) == 1 else mesh[members]._flatten("-".join(members))
            made[members] = Group(sub.size(), sub.get_local_rank(), sub.get_group(), mode)
        groups[role] = made[members]
    return ParallelState(groups, sequence_parallel=sp, dispatch=dispatch, mode=mode)
