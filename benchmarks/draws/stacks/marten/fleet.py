"""Which ranks work together at what."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import nn


@dataclass(frozen=True, eq=False)
class Crew:
    """Ranks that share one kind of work; by default a rank alone."""

    size: int = 1
    rank: int = 0
    pg: Any = None

    def __deepcopy__(self, memo):
        return self

    def peer(self, offset: int) -> int:
        """Return the global rank of a neighbor in the ring of these ranks."""
        return dist.get_global_rank(self.pg, (self.rank + offset) % self.size)


ALONE = Crew()


@dataclass(frozen=True, eq=False)
class Fleet:
    """`flag` turns on code under trial."""

    rows: Crew = ALONE  # ranks with other rows
    tokens: Crew = ALONE  # ranks with other tokens
    cp: Crew = ALONE  # ranks with other positions of the same rows
    tp: Crew = ALONE  # ranks with other channels for the same tokens
    ep: Crew = ALONE  # ranks with other experts
    twins: Crew = ALONE  # ranks with the same experts and other tokens
    pp: Crew = ALONE  # ranks with other layers
    scattered: bool = False  # whether ranks of tp have other tokens between the layers
    flag: str = ""

    def __deepcopy__(self, memo):
        return self

    def flagged(self, name: str) -> bool:
        return self.flag == name


SOLO = Fleet()

MEMBERS = {
    "rows": ("dp_replicate", "dp_shard"),
    "tokens": ("dp_replicate", "dp_shard", "cp"),
    "cp": ("cp",),
    "ep": ("dp_shard",),
    "twins": ("dp_replicate", "cp"),
}


def form_fleet(mesh, *, last: str, flag: str = "", scattered: bool = False) -> Fleet:
    """Return the crews of a mesh. `last` says what the ranks of its last axis are: tp or pp."""
    formed: dict[tuple[str, ...], Crew] = {(): ALONE}

    def form(members: tuple[str, ...]) -> Crew:
        members = tuple(name for name in members if mesh[name].size() > 1)
        if members not in formed:
            sub = mesh[members[0]] if len(members) == 1 else mesh[members]._flatten("+".join(members))
            formed[members] = Crew(sub.size(), sub.get_local_rank(), sub.get_group())
        return formed[members]

    crews = {name: form(members) for name, members in MEMBERS.items()}
    return replace(SOLO, **crews, **{last: form(("tp",))}, flag=flag, scattered=scattered)


class Piece(nn.Module):
    """A module that knows the fleet."""

    fleet: Fleet = SOLO


def board(model: nn.Module, fleet: Fleet) -> None:
    for module in model.modules():
        if isinstance(module, Piece):
            module.fleet = fleet
