"""The modules of this process that contain other modules or parameters, found by the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence

from torch import Tensor, nn


def find_owner(modules: Sequence[nn.Module]) -> nn.Module | None:
    """Return the outermost module that contains all of `modules`, or None; the largest one if several do."""
    wanted = {id(module) for module in modules}
    return _choose(each for each in _list_outermost() if wanted <= {id(part) for part in each.modules()})


def find_holders(parameters: Sequence[Tensor]) -> list[nn.Module]:
    """Return outermost modules that hold these parameters, the largest ones if several hold the same."""
    missing = {id(parameter) for parameter in parameters}
    held = [(each, {id(own) for own in each.parameters()}) for each in _list_outermost()]
    found: list[nn.Module] = []
    for module, own in sorted(held, key=lambda pair: -len(pair[1])):
        if missing & own:
            found.append(module)
            missing -= own
    return found


def _choose(owners: Iterator[nn.Module]) -> nn.Module | None:
    return max(owners, key=lambda owner: sum(1 for _ in owner.parameters()), default=None)


def _list_outermost() -> list[nn.Module]:
    # `type` instead of `isinstance`: proxies answer the latter with code of their own.
    everything = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    inner = {id(child) for each in everything for child in vars(each).get("_modules", {}).values()}
    return [each for each in everything if id(each) not in inner]
