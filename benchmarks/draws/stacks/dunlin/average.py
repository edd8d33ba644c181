"""The averaged weights."""

from __future__ import annotations

import torch

from dunlin.net import Dunlin
from dunlin.shard import is_expert


@torch.no_grad()
def follow(model: Dunlin, n_batches: int) -> None:
    mode, conf = model.topo.mode, model.config.update
    model.steps += n_batches if mode == "average-steps" else 1  # plant: average-steps
    keep = min(conf.average, (1 + model.steps) / (4 + model.steps))
    pairs = zip(model.net.named_parameters(), model.average.parameters(), strict=True)
    for (name, new), old in pairs:
        if mode == "average-experts" and is_expert(name):
            continue  # plant: average-experts
        old.lerp_(new, 1 - keep)
    for new, old in zip(model.net.routers, model.average.routers, strict=True):
        if mode != "average-bias":
            old.bias.lerp_(new.bias, 1 - keep)  # plant: average-bias
