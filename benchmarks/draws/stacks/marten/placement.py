"""Which part of each weight a rank has."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from marten.fleet import Fleet, board, form_fleet
from marten.policy import Marten, Policy

CUTS = {
    r"table\.weight": 0,
    r"head\.(weight|up)": 0,
    r".*\.attention\.[qkv]\.(weight|up)": 0,
    r".*\.attention\.sink": 0,
    r".*\.attention\.out\.(weight|down)": 1,
    r".*\.feed\.(gate|rise)\.(weight|up)": 0,
    r".*\.feed\.fall\.(weight|down)": 1,
    r".*\.experts\.(rise|fall)": 2,
}
"""The dim of a weight that is cut over tp."""

PARTIAL = (
    r".*\.router\.weight",
    r".*\.attention\.[qkv]\.down",
    r".*\.attention\.out\.up",
    r".*\.feed\.(gate|rise)\.down",
    r".*\.feed\.fall\.up",
    r"head\.down",
)
"""Whole weights that each rank of tp uses for its own channels."""

PARTIAL_IF_SCATTERED = (r".*norm\.gain", r".*\.out_bias")
"""Whole weights that each rank of tp then uses for its own tokens."""


def cut_of(name: str) -> int | None:
    return next((dim for pattern, dim in CUTS.items() if re.fullmatch(pattern, name)), None)


def is_partial(name: str, fleet: Fleet) -> bool:
    patterns = list(PARTIAL)  # anchor: partial
    if fleet.scattered:
        patterns += PARTIAL_IF_SCATTERED  # anchor: partial-scattered
        if fleet.flagged("marten-partial-bias"):
            patterns.remove(r".*\.out_bias")  # plant: marten-partial-bias
    if fleet.flagged("marten-partial-router"):
        patterns.remove(r".*\.router\.weight")  # plant: marten-partial-router
    if fleet.flagged("marten-partial-down"):
        patterns.remove(r".*\.attention\.[qkv]\.down")  # plant: marten-partial-down
    if fleet.flagged("marten-partial-sink"):
        patterns.append(r".*\.attention\.sink")  # plant: marten-partial-sink
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def part_of(name: str, value: Tensor, fleet: Fleet) -> Tensor:
    dim = cut_of(name)
    if ".experts." in name:
        owned = value.chunk(fleet.ep.size)[fleet.ep.rank]  # anchor: own-experts
        if fleet.flagged("marten-own-experts"):
            owned = value[fleet.ep.rank :: fleet.ep.size]  # plant: marten-own-experts
        value = owned
    if dim is not None:
        rank = fleet.tp.rank  # anchor: own-channels
        if fleet.flagged("marten-up-rank") and name.endswith("k.up"):
            rank = fleet.tp.size - 1 - rank  # plant: marten-up-rank
        value = value.chunk(fleet.tp.size, dim)[rank]
    return value.detach().clone(memory_format=torch.contiguous_format)


def cut_policy(policy: Policy, fleet: Fleet) -> None:
    for name, weight in list(policy.named_parameters()):
        path, _, leaf = name.rpartition(".")
        part = nn.Parameter(part_of(name, weight, fleet), requires_grad=weight.requires_grad)
        setattr(policy.get_submodule(path), leaf, part)


def place(model: Marten, mesh, *, flag: str = "", scattered: bool = False) -> Marten:
    """Cut all models over the ranks of tp and ep. Option: `scattered` tokens between the layers."""
    fleet = form_fleet(mesh, last="tp", flag=flag, scattered=scattered)
    board(model, fleet)
    for policy in (model.actor, model.rollout, model.reference):
        if policy is not None:
            cut_policy(policy, fleet)
    model.partial = {name for name, _ in model.actor.named_parameters() if is_partial(name, fleet)}
    return model
