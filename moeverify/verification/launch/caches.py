"""Invalidation of the caches that torch keeps about device meshes, between two jobs of one rank.

A mesh of the next job may compare equal to an old one. A cached result then refers to process groups of the
old mesh by name, and those groups are destroyed or replaced. The caches may be kept only if both jobs use
the same group names for equal meshes. This can be checked if all meshes of both jobs are known. Refilling
the caches takes a third of the time of a small case.
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
    from moeverify.verification.launch.propagation import PropagationMemo

_PLANNERS = "torch.distributed.tensor._redistribute"
_PROPAGATION = "torch.distributed.tensor._sharding_prop"


def find_caches() -> list[Any]:
    """Return the caches in torch's DTensor code, including those in closures.

    The search does not see objects frozen by `gc.freeze`. A process that forks ranks calls `find_imported`
    before it freezes its imports, which also saves the ranks the search.
    """
    return list({id(cache): cache for cache in (*find_imported(), *_search())}.values())


@functools.cache
def find_imported() -> tuple[Any, ...]:
    """Return the caches that existed at the first call in this process or in the one that forked it."""
    return tuple(_search())


class MeshCaches:
    """torch's caches about the meshes of a rank's jobs, kept from job to job where that is valid.

    Each job calls `begin`, then `admit` with its meshes before it uses them, then `end`, and then `settle`
    after its process groups are destroyed. `device` is the device of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._caches = find_caches()
        self._names: dict[_Part, str | None] = {}  # group names of all meshes since the last clear
        self._keeps = False
        self._left: list[DeviceMesh] = []
        self._memo: PropagationMemo | None = None

    def begin(self, keeps: bool) -> None:
        """Begin a job.

        `keeps` states that the job admits every mesh it builds, except for submeshes of admitted ones.

        On a GPU no cache is kept, because the autograd threads have their own caches.
        """
        is_cpu = self._device.type == "cpu"
        self._keeps = keeps and is_cpu
        if not self._keeps and self._names:
            self._clear()
        if is_cpu and _PROPAGATION in sys.modules:
            from moeverify.verification.launch.propagation import PropagationMemo

            self._memo = self._memo or PropagationMemo()
            self._memo.install()

    def admit(self, meshes: Iterable[DeviceMesh]) -> None:
        """Register the meshes of this job. Clear all caches if an equal mesh used groups with other names."""
        if not self._keeps:
            return
        names = dict(part for mesh in meshes for part in _name_parts(mesh))
        if any(self._names.get(part, name) != name for part, name in names.items()):
            self._clear()
        self._names |= names

    def end(self, has_failed: bool) -> None:
        """End a job whose groups still exist, and check that every mesh still alive was admitted."""
        self._keeps = self._keeps and not has_failed
        gc.collect()  # a model is part of reference cycles and would keep its meshes alive
        if self._keeps:
            self._left = [found for found in gc.get_objects() if type(found) is DeviceMesh]
            parts = [part for mesh in self._left for part in _name_parts(mesh)]
            self._keeps = all(name is not None and self._names.get(part) == name for part, name in parts)

    def settle(self) -> None:
        """Clear the caches after the groups are destroyed, unless `end` found them valid."""
        if self._memo is not None:
            self._memo.remove()
        if not self._keeps:
            self._memo = None  # code of a user may have changed an operator's rules
            self._clear()
        for mesh in self._left:
            # A registry for compilers, unused by these jobs. It would keep the threads of a destroyed group
            # alive.
            getattr(mesh, "_pg_registry", {}).clear()
        self._left = []

    def _clear(self) -> None:
        self._names = {}
        if self._memo is not None:
            self._memo.forget_meshes()
        clear_mesh_caches(self._caches, self._device)
        gc.collect()


# Name of a mesh dim, and the ranks of this rank's group along it.
_Part = tuple[str | None, tuple[int, ...]]


def _name_parts(mesh: DeviceMesh) -> Iterator[tuple[_Part, str | None]]:
    """Yield for each dim of a mesh the key that equal meshes share, and the group name if known."""
    place, names = mesh.get_coordinate(), getattr(mesh, "_dim_group_names", [])
    for dim, axis in enumerate(mesh.mesh_dim_names or [None] * mesh.ndim):
        ranks: tuple[int, ...] = ()
        if place is not None:
            at = [slice(None) if other == dim else here for other, here in enumerate(place)]
            ranks = tuple(mesh.mesh[tuple(at)].tolist())
        yield (axis, ranks), names[dim] if dim < len(names) else None


def clear_mesh_caches(caches: Sequence[Any], device: torch.device) -> None:
    """Clear every cached mesh, including the caches of other threads and caches created later.

    `device` is the device of this rank: autograd runs the backward pass of a GPU in a thread of its own.
    """
    _clear_compiled_cache()
    if device.type == "cuda":
        _ClearInBackward.apply(torch.zeros((), device=device, requires_grad=True)).backward()  # type: ignore[no-untyped-call]
    if _PLANNERS in sys.modules:  # not imported by a job without DTensor
        with contextlib.suppress(AttributeError):
            sys.modules[_PLANNERS].clear_redistribute_planner_cache()
    for cache in (*caches, *_search()):
        cache.cache_clear()


class _ClearInBackward(Function):
    """Clears the compiled cache of the thread in which autograd runs the backward pass of a device.

    That cache is thread-local. A gradient created from a spec of an old mesh refers to the old mesh. Its
    next reduction looks up the old groups by name, and those names may now belong to other groups.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _clear_compiled_cache()
        return grad


def _clear_compiled_cache() -> None:
    with contextlib.suppress(AttributeError):  # private function, absent in some releases
        torch._C._clear_DTensor_sharding_propagator_cache()


def _search() -> list[Any]:
    return [
        found
        for found in gc.get_objects()
        # `isinstance` reads `__class__` of torch's deprecated names, which emits warnings.
        if type(found) is functools._lru_cache_wrapper
        and (getattr(found, "__module__", None) or "").startswith("torch.distributed.tensor")
    ]
