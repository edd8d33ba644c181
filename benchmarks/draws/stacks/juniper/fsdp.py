"""FSDP2 for all but the experts, which are spread over the ranks that FSDP2 shards over."""

import torch
from torch.distributed.fsdp import fully_shard

from juniper.grid import add_up, install, make_grid
from juniper.parallel import cut_parameters, list_places
from juniper.weights import load


def shard(model, mesh, *, mode=""):
    grid = make_grid(mesh, mode)
    install(model, grid)
    cut_parameters(model, grid)
    load(model, model.source)
    copies = mesh["dp_replicate"].size()
    data = mesh["dp_replicate", "dp_shard"] if copies > 1 else mesh["dp_shard"]
    experts = {place.tensor for place in list_places(model) if place.is_expert}
    for part in (*model.blocks.values(), model.ahead):
        fully_shard(part, mesh=data, ignored_params=experts & set(part.parameters()))
    fully_shard(model, mesh=data, ignored_params=experts)
    model.loss_scale = grid.dp.size  # anchor: loss-scale
    if mode == "ju65":
        model.loss_scale = grid.shard.size  # plant: ju65

    @torch.no_grad()
    def finish():
        # Experts have gradients of all tokens that came to them, which are sums and no means.
        for place in list_places(model):
            if not place.is_expert:
                continue
            if mode != "ju66":  # plant: ju66
                add_up(place.tensor.grad, grid.edp)  # anchor: copies
            if mode != "ju68":  # plant: ju68
                place.tensor.grad /= grid.dp.size  # anchor: divided

    return model, finish
