"""What torch caches about device meshes, which must not outlive the groups that a mesh stood on.

A mesh of the next job may be equal to an old one, and a cached answer then uses the groups of that one, by their
names. These are gone, or others by now, unless both jobs name the groups of equal meshes alike. Where all meshes of
both are known, that can be seen, and the answers may stay: to find them costs a rank a third of a small case.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from moeverify.launch.propagation import PropagationMemo

_PLANNERS = "torch.distributed.tensor._redistribute"
_PROPAGATION = "torch.distributed.tensor._sharding_prop"


def find_caches() -> list[Any]:
    """Return the caches in torch's DTensor code, also those in closures; `gc.freeze` hides what it froze from this.

    A process that forks ranks calls `find_imported` before it freezes its imports: its ranks need not search those.
    """
    return list({id(cache): cache for cache in (*find_imported(), *_search())}.values())


@functools.cache
def find_imported() -> tuple[Any, ...]:
    """Return the caches that exist at the first call in this process or in the one that it was forked from."""
    return tuple(_search())


class MeshCaches:
    """What torch has cached about the meshes of this rank's jobs, kept from one job to the next where that is right.

    A job calls `begin`, then `admit` with the meshes that it has built, before it uses one, `end`, and `settle` when
    its groups are gone. `device` is where this rank computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._caches = find_caches()
        self._names: dict[_Part, str | None] = {}  # of the groups of all meshes since the caches were empty
        self._keeps = False
        self._left: list[DeviceMesh] = []
        self._memo: PropagationMemo | None = None

    def begin(self, keeps: bool) -> None:
        """Begin a job; `keeps` says that it builds no mesh but those that it will admit, and their parts.

        On a GPU nothing is kept: there threads of autograd have caches of their own.
        """
        self._keeps = keeps and self._device.type == "cpu"
        if not self._keeps and self._names:
            self._clear()
        if self._keeps and _PROPAGATION in sys.modules:
            from moeverify.launch.propagation import PropagationMemo

            self._memo = self._memo or PropagationMemo()
            self._memo.install()

    def admit(self, meshes: Iterable[DeviceMesh]) -> None:
        """Take the meshes of this job; forget all that is cached if an equal one stood on groups of other names."""
        if not self._keeps:
            return
        names = dict(part for mesh in meshes for part in _name_parts(mesh))
        if any(self._names.get(part, name) != name for part, name in names.items()):
            self._clear()
        self._names |= names

    def end(self, has_failed: bool) -> None:
        """End a job, whose groups still stand: look whether all meshes that are left are known."""
        self._keeps = self._keeps and not has_failed
        gc.collect()  # a model is in cycles of references, and its meshes would seem to be left
        if self._keeps:
            self._left = [found for found in gc.get_objects() if type(found) is DeviceMesh]
            parts = [part for mesh in self._left for part in _name_parts(mesh)]
            self._keeps = all(name is not None and self._names.get(part) == name for part, name in parts)

    def settle(self) -> None:
        """Forget what is cached once the groups are gone, unless `end` has found that it may stay."""
        if self._memo is not None:
            self._memo.remove()
        if not self._keeps:
            self._clear()
        for mesh in self._left:
            # For compilers, which no such job uses: it would keep the threads of a group that is gone.
            getattr(mesh, "_pg_registry", {}).clear()
        self._left = []

    def _clear(self) -> None:
        self._names = {}
        if self._memo is not None:
            self._memo.forget_meshes()
        clear_mesh_caches(self._caches, self._device)
        gc.collect()


_Part = tuple[str | None, tuple[int, ...]]
"""A name of a dim of a mesh, and the ranks along it that this rank is one of."""


def _name_parts(mesh: DeviceMesh) -> Iterator[tuple[_Part, str | None]]:
    """Yield for each dim of a mesh what equal meshes have in common, and the name of the group, if that is known."""
    place, names = mesh.get_coordinate(), getattr(mesh, "_dim_group_names", [])
    for dim, axis in enumerate(mesh.mesh_dim_names or [None] * mesh.ndim):
        ranks: tuple[int, ...] = ()
        if place is not None:
            at = [slice(None) if other == dim else here for other, here in enumerate(place)]
            ranks = tuple(mesh.mesh[tuple(at)].tolist())
        yield (axis, ranks), names[dim] if dim < len(names) else None


def clear_mesh_caches(caches: Sequence[Any], device: torch.device) -> None:
    """Forget every mesh: in these caches, and in those of threads such as autograd's, which are made later.

    `device` is where this rank computes: autograd runs the backward of a GPU in a thread of its own.
    """
    _clear_compiled_cache()
    if device.type == "cuda":
        _ClearInBackward.apply(torch.zeros((), device=device, requires_grad=True)).backward()  # type: ignore[no-untyped-call]
    if _PLANNERS in sys.modules:  # a job that used no DTensor has not imported it
        with contextlib.suppress(AttributeError):
            sys.modules[_PLANNERS].clear_redistribute_planner_cache()
    for cache in (*caches, *_search()):
        cache.cache_clear()


class _ClearInBackward(Function):
    """Clears the compiled cache of the thread in which autograd runs the backward of a device.

    That cache is each thread's own. A gradient made by a spec of an old mesh has the old mesh, and its next
    reduction goes over the old mesh's groups: by their names, which may be those of other groups by now.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _clear_compiled_cache()
        return grad


def _clear_compiled_cache() -> None:
    with contextlib.suppress(AttributeError):  # private, and not in every version
        torch._C._clear_DTensor_sharding_propagator_cache()


def _search() -> list[Any]:
    return [
        found
        for found in gc.get_objects()
        # Not `isinstance`, which asks torch's deprecated names for their class, and they warn.
        if type(found) is functools._lru_cache_wrapper
        and (getattr(found, "__module__", None) or "").startswith("torch.distributed.tensor")
    ]
