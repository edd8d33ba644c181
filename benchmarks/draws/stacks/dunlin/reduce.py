"""Gradients of a step are summed: partial ones over tp, then buckets over ranks with other tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dunlin.net import Dunlin
from dunlin.shard import is_expert
from dunlin.topo import Group
from dunlin.wire import all_sum

LIMIT = 4000


def trained(model: Dunlin) -> dict[str, nn.Parameter]:
    return dict(model.net.named_parameters())


@torch.no_grad()
def sum_partial(model: Dunlin) -> None:
    topo = model.topo
    if topo.tp.size > 1:
        for name, weight in trained(model).items():
            if name in model.partial:
                weight.grad = all_sum(weight.grad, topo.tp)  # anchor: sum-partial
    if topo.pp.size > 1:
        weight = model.net.embed.weight
        if topo.mode != "stage-tied":
            weight.grad = all_sum(weight.grad, topo.pp)  # plant: stage-tied


def list_buckets(model: Dunlin) -> Iterator[tuple[Group, list[nn.Parameter]]]:
    topo = model.topo
    for expert in (False, True):
        group = topo.twins if expert else topo.tokens  # anchor: twins
        if topo.trial("twins-data"):
            group = topo.over("dp_replicate", "dp_shard") if expert else topo.tokens  # plant: twins-data
        held: list[nn.Parameter] = []
        for name, weight in trained(model).items():
            if is_expert(name) != expert:
                continue
            held.append(weight)
            if sum(each.numel() for each in held) > LIMIT:
                yield group, held
                held = []
        if held and not topo.trial("bucket-tail"):  # plant: bucket-tail
            yield group, held  # anchor: bucket-tail


class InFlight:
    """The gradients of a bucket, flat, while they are summed."""

    def __init__(self, group: Group, weights: list[nn.Parameter], mode: str) -> None:
        self.weights, self.mode, self.group = weights, mode, group
        self.flat = torch.cat([weight.grad.flatten() for weight in weights])
        if mode == "bucket-float":
            self.flat = self.flat.float()  # plant: bucket-float
        self.work = dist.all_reduce(self.flat, group=group.pg, async_op=True)  # anchor: bucket-sum

    def land(self) -> None:
        if self.mode != "bucket-wait":
            self.work.wait()  # plant: bucket-wait
        sizes = [weight.numel() for weight in self.weights]
        for weight, part in zip(self.weights, self.flat.split(sizes), strict=True):
            weight.grad.copy_(part.view_as(weight))


@torch.no_grad()
def reduce_gradients(model: Dunlin) -> None:
    sum_partial(model)
    mode, flights = model.topo.mode, []
    if mode == "expert-mean":
        for name, weight in trained(model).items():
            if is_expert(name):
                weight.grad /= model.topo.ep.size  # plant: expert-mean
    for group, weights in list_buckets(model):
        if group.size > 1:
            flights.append(InFlight(group, weights, mode))
    for flight in flights:
        flight.land()


def flatten(tensors: list[Tensor], length: int) -> Tensor:
    """Return tensors one after the other, with zeros up to a length."""
    flat = torch.cat([each.detach().flatten() for each in tensors])
    return torch.cat([flat, flat.new_zeros(length - len(flat))])
