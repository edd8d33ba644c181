"""From the whole model to that of a rank, and the reduction of gradients in flat pools."""

import torch
import torch.distributed as dist
from torch import nn

from wren.model import cuts_of, install
from wren.world import World, own_part, raw_sum


def parallelize(model, mesh, *, drill="", zigzag=False):
    world = World(mesh, drill=drill, zigzag=zigzag)
    install(model, world)
    cut(model)
    return model


def cut(model):
    """Replace parameters by this rank's blocks of them."""
    for name, parameter in list(model.named_parameters()):
        value = slice_of(name, parameter.detach(), model.world)
        if value.shape != parameter.shape:
            module, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module), leaf, nn.Parameter(value))


def slice_of(name, value, w):
    """Return this rank's block of a parameter."""
    for team, dim in cuts_of(name).items():
        value = own_part(value.transpose(0, dim), getattr(w, team)).transpose(0, dim)
    return value.clone(memory_format=torch.contiguous_format)


class Pool:
    """Gradients of parameters that are reduced over one team, in one flat tensor cut in buckets."""

    def __init__(self, named, team, c, w):
        self.named, self.team, self.c, self.w = named, team, c, w
        self.numel = sum(p.numel() for _, p in named)
        padded = -(-self.numel // team.size) * team.size
        self.flat = named[0][1].new_zeros(padded)
        self.edges = [*range(0, padded, c.bucket), padded]

    def buckets(self):
        return [self.flat[a:b] for a, b in zip(self.edges, self.edges[1:])]

    def attach(self):
        """Let gradients accumulate in the pool, from zero."""
        self.flat.zero_()
        first = 0
        for _, parameter in self.named:
            parameter.grad = self.flat[first : first + parameter.numel()].view_as(parameter)
            first += parameter.numel()

    def reduce(self):
        """Sum the buckets over the team, all of them under way at once."""
        if self.team.size == 1:
            return
        flights, buckets = [], self.buckets()  # anchor: all-buckets
        if self.w.has("wren-last-bucket"):
            full = self.numel // self.c.bucket
            buckets = buckets[:full]  # plant: wren-last-bucket
        for bucket in buckets:
            whole = bucket
            if self.w.has("wren-reduce-single"):
                whole = bucket.float()  # plant: wren-reduce-single
            flights.append((bucket, whole, dist.all_reduce(whole, group=self.team.handle, async_op=True)))
        for bucket, whole, flight in flights:
            flight.wait()
            bucket.copy_(whole)


def pools_of(model):
    """Return the pools of dense parameters and of experts."""
    c, w = model.c, model.world
    named = list(model.named_parameters())
    experts = [(n, p) for n, p in named if "ep" in cuts_of(n)]
    dense = [(n, p) for n, p in named if "ep" not in cuts_of(n)]
    team = w.edp  # anchor: expert-team
    if w.has("wren-experts-everywhere"):
        team = w.tok  # plant: wren-experts-everywhere
    kinds = [(dense, w.tok), (experts, team)]
    return [Pool(members, team, c, w) for members, team in kinds if members]


@torch.no_grad()
def add_slices(model):
    """Add up gradients of whole parameters, which ranks of `tp` used for their tokens or heads."""
    w = model.world
    whole = [(n, p) for n, p in model.named_parameters() if "tp" not in cuts_of(n)]  # anchor: whole
    if w.has("wren-slices-gains"):
        whole = [(n, p) for n, p in whole if not n.endswith("k_gain")]  # plant: wren-slices-gains
    if w.has("wren-slices-router"):
        whole = [(n, p) for n, p in whole if "router" not in n]  # plant: wren-slices-router
    if w.has("wren-slices-again"):
        gains = [(n, p) for n, p in model.named_parameters() if n.endswith("sub_gain")]
        whole = whole + gains  # plant: wren-slices-again
    flat = raw_sum(torch.cat([p.grad.flatten() for _, p in whole]), w.tp)
    for (_, p), part in zip(whole, flat.split([p.numel() for _, p in whole])):
        p.grad.copy_(part.view_as(p))


@torch.no_grad()
def complete(model, pools):
    """Make gradients those of the global batch."""
    add_slices(model)
    for pool in pools:
        pool.reduce()
