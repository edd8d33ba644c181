"""Views of a model's routers for the training loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from moeverify.model.router import RouterSlot
from moeverify.parallel.regions.local_shard import logical_name
from moeverify.parallel.regions.region import Indices


@dataclass(frozen=True)
class RouterView:
    """A router, its logical name, and a map from this rank's positions to those that the router sees."""

    name: str
    module: RouterSlot
    positions: Callable[[Indices], Indices] = field(default=lambda positions: positions)


def find_routers(model: nn.Module) -> list[RouterView]:
    """Return the routers of a model that can be observed and replayed, in layer order."""
    return [
        RouterView(logical_name(name), module)
        for name, module in model.named_modules()
        if isinstance(module, RouterSlot)
    ]
