"""Completes the gradients of a step: sums over tp of partial ones, then buckets over ranks with other tokens."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from marten.comms import total
from marten.fleet import Crew, Fleet
from marten.policy import Marten, is_adapter

ROOM, UNIT = 3000, 32


def trained(model: Marten) -> dict[str, Tensor]:
    return {name: weight for name, weight in model.actor.named_parameters() if weight.requires_grad}


def is_expert(name: str) -> bool:
    return ".experts." in name


@torch.no_grad()
def sum_partial(model: Marten) -> None:
    """Sum gradients of weights of which each rank of tp used a whole copy for a part of the work."""
    fleet = model.fleet
    names = [name for name in trained(model) if name in model.partial]
    if fleet.tp.size == 1 or not names:
        return
    grads = [trained(model)[name].grad for name in names]
    flat = total(torch.cat([grad.flatten() for grad in grads]), fleet.tp)  # anchor: partial-sum
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


class Bucket:
    """Gradients that are sums over the same ranks. Each begins at a multiple of `UNIT` values for each rank."""

    def __init__(self, crew: Crew, fleet: Fleet) -> None:
        self.crew, self.fleet, self.weights = crew, fleet, []
        self.work, self.flat = None, None

    def pad(self, n: int) -> int:
        unit = UNIT * self.crew.size
        return -(-n // unit) * unit

    @property
    def room(self) -> int:
        return sum(self.pad(weight.numel()) for weight in self.weights)

    def begin(self) -> None:
        if self.crew.size == 1:
            return
        self.flat = self.weights[0].new_zeros(self.room)
        first = 0
        for weight in self.weights:
            self.flat[first : first + weight.numel()] = weight.grad.flatten()
            first += self.pad(weight.numel())
        if self.fleet.flagged("marten-bucket-mean"):
            self.flat /= self.crew.size  # plant: marten-bucket-mean
        if self.fleet.flagged("marten-bucket-narrow"):
            self.flat = self.flat.float()  # plant: marten-bucket-narrow
        self.work = dist.all_reduce(self.flat, group=self.crew.pg, async_op=True)  # anchor: bucket-sum

    def end(self) -> None:
        if self.work is None:
            return
        self.work.wait()
        first = 0
        for weight in self.weights:
            weight.grad.copy_(self.flat[first : first + weight.numel()].view_as(weight))
            if self.fleet.flagged("marten-bucket-pad"):
                first += weight.numel()  # plant: marten-bucket-pad
            else:
                first += self.pad(weight.numel())  # anchor: bucket-pad
        self.work = self.flat = None


def fill_buckets(model: Marten) -> list[Bucket]:
    fleet, buckets = model.fleet, []
    open_: dict[bool, Bucket] = {}
    twins = fleet.twins  # anchor: twins
    if fleet.flagged("marten-twins-tokens"):
        twins = fleet.tokens  # plant: marten-twins-tokens
    for name, weight in trained(model).items():
        kind = is_expert(name)
        if kind not in open_ or open_[kind].room > ROOM:
            open_[kind] = Bucket(twins if kind else fleet.tokens, fleet)
            buckets.append(open_[kind])
        open_[kind].weights.append(weight)
    if fleet.flagged("marten-adapters-twice"):
        extra = Bucket(fleet.tokens, fleet)  # plant: marten-adapters-twice
        extra.weights = [
            w for n, w in trained(model).items() if is_adapter(n)
        ]  # plant: marten-adapters-twice
        buckets.append(extra)  # plant: marten-adapters-twice
    return buckets


@torch.no_grad()
def complete(model: Marten) -> None:
    sum_partial(model)
    for bucket in fill_buckets(model):
        bucket.begin()
        bucket.end()
