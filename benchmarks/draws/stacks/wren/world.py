"""Who works with whom. A team of one rank communicates nothing."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

AXES = ("dp_replicate", "dp_shard", "cp", "tp")


@dataclass(eq=False)
class Team:
    size: int = 1
    rank: int = 0
    handle: object = None

    def __deepcopy__(self, memo):
        return self


class World:
    """The teams of a rank.

    dp: other rows; tok: other tokens of the batch; ep: other experts; edp: the same experts and other tokens;
    cp: other parts of the same rows; tp: other slices of the layers; pp: other layers.
    """

    def __init__(self, mesh=None, *, drill="", zigzag=False, pipe=False):
        self.drill, self.zigzag = drill, zigzag
        self.dp = self.team(mesh, "dp_replicate", "dp_shard")
        if self.has("wren-tok-without-cp"):
            self.tok = self.team(mesh, "dp_replicate", "dp_shard")  # plant: wren-tok-without-cp
        else:
            self.tok = self.team(mesh, "dp_replicate", "dp_shard", "cp")  # anchor: tok-team
        self.ep = self.team(mesh, "dp_shard")
        self.edp = self.team(mesh, "dp_replicate", "cp")
        self.cp = self.team(mesh, "cp")
        self.tp = Team() if pipe else self.team(mesh, "tp")
        self.pp = self.team(mesh, "tp") if pipe else Team()

    def __deepcopy__(self, memo):
        return self

    def has(self, name):
        return self.drill == name

    def team(self, mesh, *names):
        """Make one group for each line of ranks along some axes, and return the team of this rank."""
        if mesh is None or (size := math.prod(mesh[name].size() for name in names)) == 1:
            return Team()
        others = [name for name in AXES if name not in names]
        order = [list(mesh.mesh_dim_names).index(name) for name in (*others, *names)]
        mine, me = None, dist.get_rank()
        for ranks in mesh.mesh.permute(order).reshape(-1, size).tolist():
            handle = dist.new_group(ranks)
            if me in ranks:
                mine = Team(size, ranks.index(me), handle)
        return mine


def raw_sum(x, team, op=dist.ReduceOp.SUM):
    """Return the sum (or another reduction) of a tensor over a team."""
    out = x.clone(memory_format=torch.contiguous_format)
    if team.size > 1:
        dist.all_reduce(out, op=op, group=team.handle)
    return out


def raw_gather(x, team):
    """Return the parts of all ranks, joined along dim 0 in the order of ranks."""
    out = x.new_empty(team.size * x.shape[0], *x.shape[1:])
    if team.size > 1:
        dist.all_gather_into_tensor(out, x.contiguous(), group=team.handle)
    else:
        out.copy_(x)
    return out


def raw_scatter(x, team):
    """Return this rank's part along dim 0 of the sum over a team."""
    if team.size == 1:
        return x.clone()
    out = x.new_empty(x.shape[0] // team.size, *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=team.handle)
    return out


def own_part(x, team):
    """Return this rank's part along dim 0."""
    part = len(x) // team.size
    return x[team.rank * part : (team.rank + 1) * part]


def swap_counts(counts, team):
    """Return what each rank will send here, given what goes to each rank."""
    out = counts.clone()
    if team.size > 1:
        dist.all_to_all_single(out, counts.contiguous(), group=team.handle)
    return out
