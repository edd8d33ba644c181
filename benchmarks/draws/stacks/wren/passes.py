"""Forward and backward passes of a step. With stages over ranks, all forward passes come first."""

import torch
import torch.distributed as dist

from wren.model import install
from wren.parallel import cut
from wren.world import World, raw_sum


def stages(model, mesh, *, drill=""):
    """Keep the layers of this rank's stage. The ranks of `tp` in the mesh are the stages."""
    world = World(mesh, drill=drill, pipe=True)
    install(model, world)
    pp = world.pp
    each = model.c.layers // pp.size
    for layer in range(model.c.layers):
        if layer // each != pp.rank:
            del model.blocks[str(layer)]
    cut(model)
    if pp.rank > 0:
        model.embed = None
    if pp.rank < pp.size - 1:
        model.head = None
    if world.has("wren-noise-stage"):
        for number, router in enumerate(model.routers()):
            router.layer = number  # plant: wren-noise-stage
    return model


def count_targets(micro_batches, w):
    """Return the number of targets of the global batch that count."""
    count = sum((targets >= 0).sum() for _, targets in micro_batches)
    if w.has("wren-count-own"):
        return count * w.tok.size  # plant: wren-count-own
    return raw_sum(count, w.tok)  # anchor: count


class Passes:
    """The passes of one step of this rank's stage."""

    def __init__(self, model, micro_batches):
        self.model, self.batches, self.w = model, micro_batches, model.world
        self.count = count_targets(micro_batches, self.w)
        self.open, self.flights, self.inbox = [], [], {}
        self.value = 0.0

    def zero(self):
        return torch.zeros((), dtype=next(self.model.parameters()).dtype)

    def send(self, x, to):
        x = x.detach().contiguous()
        self.flights.append((dist.isend(x, group=self.w.pp.handle, group_dst=to), x))

    def receive(self, origin, tokens):
        shape = tokens.shape[1], tokens.shape[0], self.model.c.width
        x = torch.empty(shape, dtype=next(self.model.parameters()).dtype)  # anchor: new-buffer
        if self.w.has("wren-inbox"):
            x = self.inbox.setdefault(origin, x).data  # plant: wren-inbox
        dist.recv(x, group=self.w.pp.handle, group_src=origin)
        return x

    def forward(self, tokens, targets):
        w, pp, entry = self.w, self.w.pp, None
        if pp.size == 1:
            x, terms = None, self.model(tokens, targets)
        else:
            if pp.rank > 0:
                entry = self.receive(pp.rank - 1, tokens).requires_grad_()
            x, terms = self.model.stage(tokens, targets, entry)
        if pp.rank < pp.size - 1:
            self.send(x, pp.rank + 1)
        value = sum(terms.values(), self.zero()) / self.count  # anchor: per-token
        if w.has("wren-per-stage"):
            value = value / pp.size  # plant: wren-per-stage
        if w.has("wren-per-row"):
            value = value * w.dp.size / w.tok.size  # plant: wren-per-row
        self.value = self.value + value.detach()
        self.open.append((entry, x, value, tokens))

    def backward(self):
        pp = self.w.pp
        entry, x, value, tokens = self.open.pop(0)
        if pp.rank == pp.size - 1:
            value.backward()
        else:
            gradient = self.receive(pp.rank + 1, tokens)
            if value.requires_grad:
                torch.autograd.backward([x, value], [gradient, None])
            else:
                x.backward(gradient)
        if entry is not None:
            self.send(entry.grad, pp.rank - 1)

    def run(self):
        """Return the loss of the global batch."""
        ahead = 0 if self.w.pp.size == 1 else len(self.batches)
        for i, (tokens, targets) in enumerate(self.batches):
            self.forward(tokens, targets)
            if i >= ahead:
                self.backward()
        while self.open:
            self.backward()
        for flight, _ in self.flights:
            flight.wait()
        return raw_sum(raw_sum(self.value, self.w.pp), self.w.tok)
