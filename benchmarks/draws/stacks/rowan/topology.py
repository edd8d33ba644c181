"""Which ranks share what. A network runs `with use(topology)`, and its parts ask `here()`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

DATA = ("dp_replicate", "dp_shard", "cp")


class Topology:
    """Axes of a mesh by name, or those of one device. `quirk` chooses an experimental variant."""

    def __init__(self, mesh: DeviceMesh | None = None, quirk: str = "", chunk: int = 4, remat: bool = False):
        self.mesh, self.quirk, self.chunk, self.remat = mesh, quirk, chunk, remat
        self._groups: dict[tuple[str, ...], dist.ProcessGroup | None] = {}

    def __deepcopy__(self, memo):
        return self

    def size(self, *axes: str) -> int:
        total = 1
        for axis in axes:
            total *= 1 if self.mesh is None else self.mesh[axis].size()
        return total

    def rank(self, axis: str) -> int:
        return 0 if self.size(axis) == 1 else self.mesh[axis].get_local_rank()

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """Return the group of the ranks that differ along `axes`, and None if this rank is alone in it."""
        if axes not in self._groups:
            self._groups[axes] = self._make_group([axis for axis in axes if self.size(axis) > 1])
        return self._groups[axes]

    def _make_group(self, names: list[str]) -> dist.ProcessGroup | None:
        if len(names) < 2:
            return self.mesh[names[0]].get_group() if names else None
        return self.mesh[tuple(names)]._flatten("-".join(names)).get_group()

    @cached_property
    def tokens(self) -> dist.ProcessGroup | None:
        """The ranks that read different tokens."""
        return self.group(*DATA)

    def odd(self, name: str) -> bool:
        return self.quirk == name


_SOLO = Topology()
_ACTIVE: list[Topology] = []


def here() -> Topology:
    return _ACTIVE[-1] if _ACTIVE else _SOLO


@contextmanager
def use(topology: Topology) -> Iterator[Topology]:
    _ACTIVE.append(topology)
    try:
        yield topology
    finally:
        _ACTIVE.pop()
