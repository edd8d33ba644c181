"""Which ranks a model is spread over. One device has the default: every axis has one rank."""

from dataclasses import dataclass, field

import torch.distributed as dist


@dataclass(eq=False)
class Axis:
    """One axis of the mesh: its process group, this rank's place in it and its size."""

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1

    def global_rank(self, rank):
        return dist.get_global_rank(self.group, rank % self.size)

    def __deepcopy__(self, memo):
        return self


@dataclass(eq=False)
class Parallel:
    """The axes of a run. `data` has all ranks that see different tokens."""

    data: Axis = field(default_factory=Axis)
    shard: Axis = field(default_factory=Axis)
    tp: Axis = field(default_factory=Axis)
    cp: Axis = field(default_factory=Axis)
    bug: str = ""

    def using(self, *bugs):
        return self.bug in bugs

    def __deepcopy__(self, memo):
        return self


def axis_of(mesh, *names):
    """Return the axis of one or more dimensions of a mesh that has this rank."""
    names = [name for name in names if mesh[name].size() > 1] or list(names[:1])
    sub = mesh[names[0]] if len(names) == 1 else mesh[tuple(names)]._flatten("_".join(names))
    return Axis(sub.get_group(), sub.get_local_rank(), sub.size())


def attach(model, ps):
    """Let all modules of a model know the axes."""
    for module in model.modules():
        if hasattr(module, "ps"):
            module.ps = ps
    return model
