"""Ranks and process groups of a run. One device has a context without a mesh."""

import torch
import torch.distributed as dist
from torch import nn

DATA = ("dp_replicate", "dp_shard", "cp")


class Context:
    """`variant` selects experimental code paths, `ring` the attention over `cp`, `spread` expert parallelism."""

    def __init__(self, mesh=None, variant="", ring=False, spread=True):
        self.mesh, self.variant, self.ring, self.spread = mesh, variant, ring, spread
        self.made = {}

    def __deepcopy__(self, memo):
        return self

    def on(self, *variants):
        return self.variant in variants

    def size(self, *axes):
        count = 1
        for axis in axes:
            count *= 1 if self.mesh is None else self.mesh[axis].size()
        return count

    def rank(self, axis):
        return 0 if self.size(axis) == 1 else self.mesh[axis].get_local_rank()

    def submesh(self, *axes):
        """Return the mesh of the axes with more than one rank, flattened to one dimension, or None."""
        axes = tuple(axis for axis in axes if self.size(axis) > 1)
        if not axes:
            return None
        if axes not in self.made:
            sub = self.mesh[axes[0]] if len(axes) == 1 else self.mesh[axes]._flatten("_".join(axes))
            self.made[axes] = sub
        return self.made[axes]

    def group(self, *axes):
        sub = self.submesh(*axes)
        return None if sub is None else sub.get_group()

    @property
    def ep(self):
        """The group over which experts are spread."""
        return self.group("dp_shard") if self.spread else None

    @property
    def ep_size(self):
        return self.size("dp_shard") if self.spread else 1

    @property
    def data_size(self):
        return self.size(*DATA)

    def places(self, length, rank=None):
        """Return where the tokens of a rank of `cp` stand in the row: a run, or two chunks of a zigzag."""
        ranks, rank = self.size("cp"), self.rank("cp") if rank is None else rank
        if ranks == 1 or self.ring:
            return torch.arange(rank * length, (rank + 1) * length)
        half = length // 2
        second = 2 * ranks - 1 - rank
        if self.on("hazel-zigzag-second"):
            second = ranks + rank  # plant: hazel-zigzag-second
        chunks = [torch.arange(chunk * half, (chunk + 1) * half) for chunk in (rank, second)]
        return torch.cat(chunks)


class Part(nn.Module):
    """A module that knows the context of the run."""

    ctx = Context()


def attach(model, ctx):
    for module in model.modules():
        if isinstance(module, Part):
            module.ctx = ctx


def global_rank():
    return dist.get_rank() if dist.is_initialized() else 0
