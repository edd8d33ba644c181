"""Groups of ranks. A program on one device has groups of one rank, which communicate nothing."""

from dataclasses import dataclass, field

import torch.distributed as dist


@dataclass(eq=False)
class Axis:
    size: int = 1
    rank: int = 0
    pg: object = None

    def __deepcopy__(self, memo):
        return self


@dataclass(eq=False)
class Topo:
    """The groups that a rank is in, and the name of code that is being tried."""

    data: Axis = field(default_factory=Axis)  # ranks with other tokens
    rows: Axis = field(default_factory=Axis)  # ranks with other rows
    copies: Axis = field(default_factory=Axis)  # ranks with the same experts and other tokens
    replicas: Axis = field(default_factory=Axis)
    ep: Axis = field(default_factory=Axis)
    cp: Axis = field(default_factory=Axis)
    tp: Axis = field(default_factory=Axis)
    pp: Axis = field(default_factory=Axis)
    trial: str = ""

    def on(self, name):
        return self.trial == name

    def __deepcopy__(self, memo):
        return self


def axes_of(mesh):
    """Return a function from names of a mesh's axes to the group over them."""
    known = {}

    def axis(*names):
        names = tuple(name for name in names if mesh[name].size() > 1)
        if not names:
            return Axis()
        if names not in known:
            sub = mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("+".join(names))
            known[names] = Axis(sub.size(), sub.get_local_rank(), sub.get_group())
        return known[names]

    return axis


def make_topo(mesh, trial="", *, pipe=False):
    axis = axes_of(mesh)
    last = axis("tp")
    return Topo(
        data=axis("dp_replicate", "dp_shard", "cp"),
        rows=axis("dp_replicate", "dp_shard"),
        copies=axis("dp_replicate", "cp"),
        replicas=axis("dp_replicate"),
        ep=axis("dp_shard"),
        cp=axis("cp"),
        tp=Axis() if pipe else last,
        pp=last if pipe else Axis(),
        trial=trial,
    )


def all_sum(x, *axes):
    """Add up a tensor over ranks in place, axis by axis, and return it."""
    for axis in axes:
        if axis.size > 1:
            dist.all_reduce(x, group=axis.pg)
    return x
