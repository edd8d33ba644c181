"""Why a valid case cannot run on this machine. No torch."""

from __future__ import annotations

from moeverify.case.schema import Case
from moeverify.launch.plan import Device
from moeverify.results.obstacle import Obstacle, RankLimit, TooFewRanks
from moeverify.validation import choices


def find_obstacle(case: Case, device: Device, limit: RankLimit) -> Obstacle | None:
    """Return why a case cannot run here: too few ranks, or what a chosen implementation lacks on this device."""
    needed = case.layout.world_size
    if needed > limit.most:
        return TooFewRanks(num_needed=needed, limit=limit)
    return choices.find_obstacle(case, device)
