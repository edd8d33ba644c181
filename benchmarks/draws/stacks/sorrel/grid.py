"""The grid of ranks. On one device every group is None and every size 1."""

from torch import nn

DATA = ("dp_replicate", "dp_shard", "cp")
EXPERT = ("dp_shard", "tp")  # experts are spread over these
EXPERT_COPIES = ("dp_replicate", "cp")


class Grid:
    """Sizes, ranks and groups by names of axes. `variant` turns on code that is being tried out."""

    def __init__(self, mesh=None, variant="", stages=None):
        self.mesh, self.variant, self.stages = mesh, variant, stages
        self._meshes = {}

    def __deepcopy__(self, memo):
        return self

    def has(self, *names):
        return self.variant in names

    def _mesh(self, axes):
        axes = tuple(axis for axis in axes if self.size(axis) > 1)
        if axes and axes not in self._meshes:
            if len(axes) == 1:
                self._meshes[axes] = self.mesh[axes[0]]
            else:
                self._meshes[axes] = self.mesh[axes]._flatten("x".join(axes))
        return self._meshes.get(axes)

    def size(self, *axes):
        count = 1
        for axis in axes:
            count *= 1 if self.mesh is None else self.mesh[axis].size()
        return count

    def group(self, *axes):
        mesh = self._mesh(axes)
        return None if mesh is None else mesh.get_group()

    def rank(self, *axes):
        mesh = self._mesh(axes)
        return 0 if mesh is None else mesh.get_local_rank()


class GridModule(nn.Module):
    """A module that knows the grid."""

    grid = Grid()


def install(model, grid):
    for module in model.modules():
        if isinstance(module, GridModule):
            module.grid = grid
