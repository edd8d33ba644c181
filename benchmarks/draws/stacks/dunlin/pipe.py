"""Two stages: all forward passes, then all backward passes. Both have the tied embedding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dunlin.batch import Batch
from dunlin.net import Dunlin
from dunlin.shard import nets
from dunlin.topo import Topology, install


def split(model: Dunlin, mesh, *, first: int = 1, mode: str = "") -> Dunlin:
    """Make stages of the ranks of `tp`: the first one has the `first` blocks, the last one the others."""
    topo = Topology(mesh, mode=mode, stages=True)
    install(model, topo)
    start = 0 if topo.pp.is_first else first
    stop = first if topo.pp.is_first else len(model.net.blocks)  # anchor: stage-blocks
    if topo.mode == "stage-overlap":
        start = max(0, start - 1)  # plant: stage-overlap
    for net in nets(model):
        for number in list(net.blocks):
            if not start <= int(number) < stop:
                del net.blocks[number]
        if not topo.pp.is_last:
            net.norm = net.ahead = None
    return model


class Pipeline:
    def __init__(self, model: Dunlin) -> None:
        self.model, self.topo = model, model.topo
        self.pending: list[tuple[dist.Work, Tensor]] = []
        self.inbox: Tensor | None = None

    def send(self, x: Tensor) -> None:
        x = x.detach().contiguous()
        self.pending.append((dist.isend(x, self.topo.pp.rank_at(1), self.topo.pp.pg), x))

    def receive(self, batch: Batch) -> Tensor:
        weight = self.model.net.embed.weight
        box = weight.new_empty((*batch.tokens.shape, self.model.config.width))  # anchor: inbox
        if self.topo.trial("stage-inbox"):
            self.inbox = box if self.inbox is None else self.inbox  # plant: stage-inbox
            box = self.inbox  # plant: stage-inbox
        dist.recv(box, self.topo.pp.rank_at(-1), self.topo.pp.pg)
        return box.detach()

    def settle(self) -> None:
        for work, _ in self.pending:
            work.wait()
        self.pending.clear()

    def passes(
        self, batches: Sequence[Batch], combine: Callable[[Tensor, Tensor], Tensor], rows: Tensor
    ) -> Iterator[Tensor]:
        return self.last(batches, combine, rows) if self.topo.pp.is_last else self.first(batches, rows)

    def first(self, batches: Sequence[Batch], rows: Tensor) -> Iterator[Tensor]:
        net, topo, waiting = self.model.net, self.topo, []
        for batch in batches:
            x, balance = net.trunk(net.embed(batch.tokens), batch)
            waiting.append((x, balance / rows))
            self.send(x)
        self.settle()
        for batch, (x, balance) in zip(batches, waiting, strict=True):
            grad = self.receive(batch)  # anchor: stage-gradient
            if topo.mode == "stage-scale":
                grad = grad / len(batches)  # plant: stage-scale
            ends = [(x, grad), (balance, torch.ones_like(balance))]
            ends = [(y, dy) for y, dy in ends if y.requires_grad]
            torch.autograd.backward([y for y, _ in ends], [dy for _, dy in ends])
            yield balance.detach()

    def last(
        self, batches: Sequence[Batch], combine: Callable[[Tensor, Tensor], Tensor], rows: Tensor
    ) -> Iterator[Tensor]:
        net, waiting = self.model.net, []
        for batch in batches:
            x = self.receive(batch).requires_grad_()
            y, balance = net.trunk(x, batch)
            waiting.append((x, combine(*net.tail(y, batch)) + balance / rows))
        for x, value in waiting:
            value.backward()
            self.send(x.grad)
            yield value.detach()
        self.settle()
