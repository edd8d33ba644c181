"""Why a valid case cannot run on this machine. No torch."""

from __future__ import annotations

import importlib.util

from moeverify.case.schema import Case
from moeverify.launch.plan import Device
from moeverify.results.obstacle import (
    MissingPackages,
    Obstacle,
    RankLimit,
    TooFewRanks,
    Unsupported,
    UnsupportedHere,
)

_MEGABLOCKS = ("megablocks", "stk", "triton")


def find_obstacle(case: Case, device: Device, limit: RankLimit) -> Obstacle | None:
    """Return why a case cannot run here: too few ranks, packages that are missing, a device that cannot do it."""
    needed = case.layout.world_size
    if needed > limit.most:
        return TooFewRanks(num_needed=needed, limit=limit)
    if device == "cpu" and case.layout.cp > 1 and case.layout.context_parallel == "torch":
        return UnsupportedHere(what=Unsupported.CONTEXT_PARALLEL_ON_CPU)
    if case.layout.experts == "megablocks":
        return _find_megablocks_obstacle(case, device)
    return None


def _find_megablocks_obstacle(case: Case, device: Device) -> Obstacle | None:
    missing = tuple(name for name in _MEGABLOCKS if importlib.util.find_spec(name) is None)
    if missing:
        return MissingPackages(needed_by="megablocks", packages=missing, install="make megablocks")
    if device == "cuda" and case.recipe.precision == "float64":
        return UnsupportedHere(what=Unsupported.MEGABLOCKS_FLOAT64_ON_CUDA)
    return None
