"""Calls of user code that take process groups from a mesh, or make them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moeverify.explain.program import Site
from moeverify.explain.sites import find_sites, is_own
from moeverify.explain.waits import Function, wrapped

_MOST = 8
"""Maximum number of calls that are kept for each group."""


_CALLS = ((DeviceMesh, ("get_group",)), (dist, ("new_group",)))


@contextmanager
def follow_groups(found: dict[str, list[tuple[Site, ...]]]) -> Iterator[None]:
    """Record the lines that take or make each process group during the block, by the name of the group."""

    def follow(_: Any, name: str, call: Function) -> Function:
        def followed(*args: Any, **named: Any) -> Any:
            group = call(*args, **named)
            sites = find_sites()
            if isinstance(group, dist.ProcessGroup) and sites and not is_own(sites[0]):
                known = found.setdefault(group.group_name, [])
                if sites not in known and len(known) < _MOST:
                    known.append(sites)
            return group

        return followed

    with wrapped(_CALLS, follow):
        yield
