"""Calls of user code that take process groups from a mesh or make them, and that give an optimizer parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moeverify.explain.program import Program, Site
from moeverify.explain.sites import find_sites, is_own
from moeverify.explain.waits import Function, wrapped

_MOST = 8
"""Maximum number of calls that are kept for each process group, and for optimizers."""


_CALLS = (
    (DeviceMesh, ("get_group",)),
    (dist, ("new_group",)),
    (torch.optim.Optimizer, ("add_param_group",)),
)


@contextmanager
def follow_groups(program: Program) -> Iterator[None]:
    """Record the lines that take or make each process group, or make groups of parameters, during the block."""

    def follow(_: Any, name: str, call: Function) -> Function:
        def followed(*args: Any, **named: Any) -> Any:
            made, sites = call(*args, **named), find_sites()
            if sites and not is_own(sites[0]):
                if isinstance(made, dist.ProcessGroup):
                    _keep(program.groups.setdefault(made.group_name, []), sites)
                elif name == "add_param_group":
                    _keep(program.optimizers, sites)
            return made

        return followed

    with wrapped(_CALLS, follow):
        yield


def _keep(known: list[tuple[Site, ...]], sites: tuple[Site, ...]) -> None:
    if sites not in known and len(known) < _MOST:
        known.append(sites)
