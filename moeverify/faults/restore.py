"""Undoes what a fault has replaced, so that ranks stay up from one fault to the next."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_PREFIXES = (
    "moeverify.model",
    "moeverify.parallel",
    "moeverify.train",
    "moeverify.layout",
    "moeverify.checkpoint",
    "moeverify.axes",
    "moeverify.checks",
    "moeverify.worker",
)
_TORCH = (
    "torch",
    "torch.distributed",
    "torch.distributed.distributed_c10d",
    "torch.distributed._functional_collectives",
    "torch.distributed.fsdp._fully_shard._fsdp_collectives",
    "torch.distributed.fsdp._fully_shard._fsdp_param",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group",
    "torch.nn.functional",
    "torch.nn.utils",
    "torch.optim",
)
# Of these the classes are watched too; of all of torch that would take seconds.
_TORCH_WITH_CLASSES = (
    "torch.distributed.fsdp._fully_shard._fsdp_param",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group",
)


@contextmanager
def restored() -> Iterator[None]:
    """Put back every attribute of the watched modules, and of classes defined in them, when the block ends."""
    before = [(holder, dict(vars(holder))) for holder in list_holders()]
    try:
        yield
    finally:
        for holder, attributes in before:
            _put_back(holder, attributes)


def list_holders() -> Iterator[Any]:
    """Yield the modules and classes that are watched."""
    for name, module in list(sys.modules.items()):
        if module is None or not (name.startswith(_PREFIXES) or name in _TORCH):
            continue
        yield module
        if name.startswith(_PREFIXES) or name in _TORCH_WITH_CLASSES:
            yield from _classes(module)


def _classes(module: ModuleType) -> Iterator[type]:
    for value in list(vars(module).values()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            yield value


def _put_back(holder: Any, attributes: dict[str, Any]) -> None:
    now = dict(vars(holder))
    for name, value in attributes.items():
        if name not in now or now[name] is not value:
            setattr(holder, name, value)
    for name in now.keys() - attributes.keys():
        if not name.startswith("__"):
            delattr(holder, name)
