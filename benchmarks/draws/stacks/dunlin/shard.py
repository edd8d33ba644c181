"""Cuts weights: over which groups, along which dims, and which gradients are partial sums."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from dunlin.net import Dunlin, Net
from dunlin.topo import Group, Topology, install

BY_CHANNELS = (
    (r"embed\.weight", 0),
    (r".*\.mixer\.(value|gate|conv\.kernel|keep|write|pace|norm\.gain)", 0),
    (r".*\.mixer\.(query|up_key|up_value)", 0),
    (r".*\.mixer\.out", 1),
    (r".*\.feed\.(up|down|shared_up|shared_down)|ahead\.feed\.(up|down)", 1),
    (r".*\.experts\.(up|down)", 2),
)
"""Dims of weights whose channels, heads or tokens of the vocabulary the ranks of tp share."""

ON_CHANNELS = [r".*\.router\.weight", r".*\.shared_gate", r".*\.mixer\.(down|down_gain|key_rotary)"]
"""Whole weights whose outputs each rank of tp uses for its own channels."""

ON_STREAM = [r".*\.norm[12]\.gain", r"norm\.gain", r"ahead\..*norm\.gain", r"ahead\.join"]
"""Whole weights that work on the residual stream, and so on tokens of this rank if it is scattered."""


def is_expert(name: str) -> bool:
    return ".experts." in name


def cuts(name: str, topo: Topology) -> dict[int, Group]:
    """Return the groups over which a weight is cut, by dim."""
    found: dict[int, Group] = {}
    if is_expert(name):
        found[0] = topo.ep
        if topo.ep_on_tp:
            return found
    for pattern, dim in BY_CHANNELS:
        if re.fullmatch(pattern, name):
            found[dim] = topo.tp
            break
    return {dim: group for dim, group in found.items() if group.size > 1}


def is_partial(name: str, topo: Topology) -> bool:
    """Return whether the ranks of tp have parts of a sum as its gradient."""
    patterns = [*ON_CHANNELS]  # anchor: on-channels
    if topo.sp:
        patterns += ON_STREAM  # anchor: on-stream
        if topo.mode == "stream-join":
            patterns.remove(r"ahead\.join")  # plant: stream-join
    if topo.mode == "partial-latent":
        patterns = [pattern for pattern in patterns if "key_rotary" not in pattern]  # plant: partial-latent
    if topo.mode == "partial-pace":
        patterns.append(r".*\.mixer\.(pace|conv\.kernel)")  # plant: partial-pace
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def piece(name: str, value: Tensor, topo: Topology) -> Tensor:
    for dim, group in cuts(name, topo).items():
        if topo.mode == "shard-halves" and name.endswith(("feed.up", "shared_up")):
            half = value.flatten(0, 1).chunk(group.size)[group.index]  # plant: shard-halves
            return half.reshape(2, -1, value.shape[-1]).clone()  # plant: shard-halves
        if topo.mode == "shard-heads" and name.endswith("up_value"):
            return value[group.index :: group.size].clone()  # plant: shard-heads
        value = value.chunk(group.size, dim)[group.index]  # anchor: shard
    return value.detach().clone(memory_format=torch.contiguous_format)


def nets(model: Dunlin) -> Iterator[Net]:
    yield model.net
    if model.average is not None:
        yield model.average


def cut_weights(net: Net, topo: Topology) -> None:
    for name, weight in list(net.named_parameters()):
        path, _, leaf = name.rpartition(".")
        own = piece(name, weight, topo)
        if topo.trial("pace-local") and leaf == "pace":
            own = torch.linspace(-2.0, 1.0, len(own), dtype=own.dtype)  # plant: pace-local
        setattr(net.get_submodule(path), leaf, nn.Parameter(own, requires_grad=weight.requires_grad))


def parallelize(model: Dunlin, mesh, **options) -> Dunlin:
    """Options are those of `Topology`: `sp` scatters the stream, `ep` is the axis of experts."""
    topo = Topology(mesh, **options)
    install(model, topo)
    for net in nets(model):
        cut_weights(net, topo)
        for router in net.routers:
            if topo.trial("bias-fresh"):
                router.bias.copy_(torch.zeros_like(router.bias))  # plant: bias-fresh
    if topo.mode == "kernel-seed":
        redraw(model.net, topo)  # plant: kernel-seed
    model.partial = {name for name, _ in model.net.named_parameters() if is_partial(name, topo)}
    return model


@torch.no_grad()
def redraw(net: Net, topo: Topology) -> None:
    """Draw short convolutions again, from a seed of this rank."""
    draw = torch.Generator().manual_seed(7 + topo.tokens.index)
    for name, weight in net.named_parameters():
        if name.endswith("kernel"):
            fresh = torch.randn(weight.shape, generator=draw, dtype=torch.float64)
            weight.copy_(0.5 * fresh)
