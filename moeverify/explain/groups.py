"""Calls of user code that take process groups from a mesh, or make them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moeverify.explain.program import Site
from moeverify.explain.sites import find_sites, is_own

_MOST = 8
"""Maximum number of calls that are kept for each group."""


@contextmanager
def follow_groups(found: dict[str, list[tuple[Site, ...]]]) -> Iterator[None]:
    """Record the lines that take or make each process group during the block, by the name of the group."""
    plain: list[tuple[Any, str, Callable[..., Any]]] = [
        (DeviceMesh, "get_group", DeviceMesh.get_group),
        (dist, "new_group", dist.new_group),
    ]
    for owner, name, call in plain:
        setattr(owner, name, _follow(call, found))
    try:
        yield
    finally:
        for owner, name, call in plain:
            setattr(owner, name, call)


def _follow(call: Callable[..., Any], found: dict[str, list[tuple[Site, ...]]]) -> Callable[..., Any]:
    def followed(*args: Any, **named: Any) -> Any:
        group = call(*args, **named)
        sites = find_sites()
        if isinstance(group, dist.ProcessGroup) and sites and not is_own(sites[0]):
            calls = found.setdefault(group.group_name, [])
            if sites not in calls and len(calls) < _MOST:
                calls.append(sites)
        return group

    return followed
