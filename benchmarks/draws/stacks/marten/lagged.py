"""Weights that follow those of the actor: of the rollout, and of the reference."""

from __future__ import annotations

import torch

from marten.comms import collect, mine, take_from_first
from marten.gradsync import is_expert
from marten.policy import Marten, Policy


@torch.no_grad()
def copy_weights(model: Marten, other: Policy) -> None:
    """Give another model the weights of the actor, and the biases of its routers."""
    fleet = model.fleet
    for source, target in zip(model.actor.parameters(), other.parameters(), strict=True):
        target.copy_(source)  # anchor: copy-weights
        if fleet.flagged("marten-send-experts"):
            take_from_first(target, fleet.tokens)  # plant: marten-send-experts
    for source, target in zip(model.actor.routers, other.routers, strict=True):
        target.bias.copy_(source.bias)


@torch.no_grad()
def average_weights(model: Marten, other: Policy) -> None:
    """Move weights towards those of the actor. Each rank does it for its own part, where the parts are equal."""
    fleet, decay = model.fleet, model.settings.reference_decay
    for (name, source), target in zip(model.actor.named_parameters(), other.parameters(), strict=True):
        crew = fleet.twins if is_expert(name) else fleet.tokens  # anchor: average-crew
        if fleet.flagged("marten-average-crew"):
            crew = fleet.tokens  # plant: marten-average-crew
        if len(target) % crew.size:
            target.lerp_(source, 1 - decay)
            continue
        own = mine(target, crew).lerp(mine(source, crew), 1 - decay)
        if fleet.flagged("marten-average-part"):
            mine_view = target.chunk(crew.size)[crew.rank]  # plant: marten-average-part
            mine_view.copy_(own)  # plant: marten-average-part
        else:
            target.copy_(collect(own, crew))  # anchor: average


def follow(model: Marten, n_batches: int) -> None:
    """Update the other models after a step."""
    settings, fleet = model.settings, model.fleet
    model.n_steps += 1  # anchor: count-steps
    if fleet.flagged("marten-count-batches"):
        model.n_steps += n_batches - 1  # plant: marten-count-batches
    if model.n_steps % settings.rollout_every == 0:
        copy_weights(model, model.rollout)
    if model.reference is None:
        return
    if settings.reference_every and model.n_steps % settings.reference_every == 0:
        copy_weights(model, model.reference)
    if settings.reference_decay:
        average_weights(model, model.reference)
