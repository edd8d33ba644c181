"""Groups of ranks. They are made from the table of ranks of a mesh, one group for each line through it."""

import math
from dataclasses import dataclass, field

import torch.distributed as dist


@dataclass(eq=False)
class Comm:
    """A group of ranks, of which this rank is one. A group of one rank communicates nothing."""

    size: int = 1
    rank: int = 0
    group: object = None
    ranks: tuple = (0,)

    def __deepcopy__(self, memo):
        return self


@dataclass(eq=False)
class Grid:
    dp: Comm = field(default_factory=Comm)  # ranks with other rows
    tokens: Comm = field(default_factory=Comm)  # ranks with other tokens of the batch
    ep: Comm = field(default_factory=Comm)  # ranks over which experts are spread
    edp: Comm = field(default_factory=Comm)  # ranks with the same experts
    cp: Comm = field(default_factory=Comm)
    tp: Comm = field(default_factory=Comm)
    pp: Comm = field(default_factory=Comm)
    every: Comm = field(default_factory=Comm)  # tokens and tp
    shard: Comm = field(default_factory=Comm)  # ranks over which FSDP2 shards
    row: Comm = field(default_factory=Comm)  # ranks that have parts of the same row: cp and tp
    zigzag: bool = False
    mode: str = ""

    def __deepcopy__(self, memo):
        return self


def make_comm(mesh, *over):
    """Return this rank's group over some axes of the mesh. All ranks make all groups, in one order."""
    names = list(mesh.mesh_dim_names)
    rest = [name for name in names if name not in over]
    size = math.prod(mesh[name].size() for name in over)
    if size == 1:
        return Comm()
    lines = mesh.mesh.permute([names.index(name) for name in (*rest, *over)]).reshape(-1, size)
    mine = Comm()
    for line in lines.tolist():
        group = dist.new_group(line)
        if dist.get_rank() in line:
            mine = Comm(size, line.index(dist.get_rank()), group, tuple(line))
    return mine


def make_grid(mesh, mode="", *, zigzag=False, pipe=False):
    same_experts = ("dp_replicate", "cp")  # anchor: same-experts
    if mode == "ju01":
        same_experts = ("dp_replicate",)  # plant: ju01
    data = ("dp_replicate", "dp_shard")
    if pipe:
        return Grid(
            dp=make_comm(mesh, *data),
            tokens=make_comm(mesh, *data),
            ep=make_comm(mesh, "dp_shard"),
            edp=make_comm(mesh, "dp_replicate"),
            pp=make_comm(mesh, "tp"),
            every=make_comm(mesh, *data),
            mode=mode,
        )
    return Grid(
        dp=make_comm(mesh, *data),
        shard=make_comm(mesh, "dp_shard"),
        tokens=make_comm(mesh, *data, "cp"),
        ep=make_comm(mesh, "dp_shard", "tp"),
        edp=make_comm(mesh, *same_experts),
        cp=make_comm(mesh, "cp"),
        tp=make_comm(mesh, "tp"),
        every=make_comm(mesh, *data, "cp", "tp"),
        row=make_comm(mesh, "cp", "tp"),
        zigzag=zigzag,
        mode=mode,
    )


def add_up(x, comm):
    """Sum a tensor over a group in place, and return it."""
    if comm.size > 1:
        dist.all_reduce(x, group=comm.group)
    return x


def install(model, grid):
    for module in model.modules():
        module.grid = grid
