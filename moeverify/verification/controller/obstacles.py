"""Reasons why a valid case cannot run on this machine. Does not import torch."""

from __future__ import annotations

from moeverify.cases.schema import Case
from moeverify.cases.validation import choices
from moeverify.results.obstacle import Obstacle, TooFewRanks
from moeverify.verification.controller.machine import Machine


def find_obstacle(case: Case, machine: Machine) -> Obstacle | None:
    """Return why a case cannot run here: too few ranks, or an implementation that is unavailable."""
    needed = case.layout.world_size
    if needed > machine.limit.most:
        return TooFewRanks(num_needed=needed, limit=machine.limit)
    return choices.find_obstacle(case, machine.device, machine.choose_backend(needed))
