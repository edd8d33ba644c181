"""What torch caches about device meshes, which must not outlive the groups that a mesh stood on.

A mesh of the next job may be equal to an old one, and a cached answer then uses groups that are gone.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

_PLANNERS = "torch.distributed.tensor._redistribute"


def find_caches() -> list[Any]:
    """Return the caches in torch's DTensor code, also those in closures; `gc.freeze` hides what it froze from this.

    A process that forks ranks calls `find_imported` before it freezes its imports: its ranks need not search those.
    """
    return list({id(cache): cache for cache in (*find_imported(), *_search())}.values())


@functools.cache
def find_imported() -> tuple[Any, ...]:
    """Return the caches that exist at the first call in this process or in the one that it was forked from."""
    return tuple(_search())


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
    gc.collect()


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
