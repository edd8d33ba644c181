"""The norm of the gradient, of which ranks have different parts of some weights and the same of others."""

from __future__ import annotations

import torch
from torch import Tensor

from dunlin.net import Dunlin
from dunlin.reduce import trained
from dunlin.shard import cuts, is_expert
from dunlin.topo import Group
from dunlin.wire import all_sum


def groups_of(name: str, model: Dunlin) -> tuple[Group, ...]:
    """Return the groups whose ranks have other values of a weight."""
    topo = model.topo
    if topo.mode == "norm-experts" and is_expert(name):
        return tuple(group for dim, group in cuts(name, topo).items() if dim)  # plant: norm-experts
    if topo.mode == "norm-copies" and topo.tp.size > 1:
        return tuple(dict.fromkeys([*cuts(name, topo).values(), topo.tp]))  # plant: norm-copies
    return tuple(cuts(name, topo).values())  # anchor: norm-groups


@torch.no_grad()
def gradient_norm(model: Dunlin) -> Tensor:
    topo = model.topo
    sums: dict[tuple[Group, ...], Tensor] = {}
    for name, weight in trained(model).items():
        if name == "embed.weight" and topo.pp.size > 1 and not topo.pp.is_last:
            if topo.mode != "norm-tied":
                continue  # plant: norm-tied
        square = weight.grad.double().square().sum()
        groups = groups_of(name, model)
        sums[groups] = sums.get(groups, 0.0) + square
    whole = torch.zeros((), dtype=torch.float64)
    for groups, square in sums.items():
        for group in groups:
            square = all_sum(square, group)
        whole = whole + square
    return all_sum(whole, topo.pp).sqrt()


@torch.no_grad()
def clip(model: Dunlin, limit: float) -> tuple[Tensor, Tensor]:
    norm = gradient_norm(model)
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for weight in trained(model).values():
        weight.grad.mul_(factor)
    return norm, factor
