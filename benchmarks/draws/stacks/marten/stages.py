"""Two stages: all forward passes of a step, then all backward passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from marten.comms import total
from marten.fleet import board, form_fleet
from marten.packing import Batch
from marten.policy import Marten, Output, Policy


def split(model: Marten, mesh, *, flag: str = "", first: int = 2) -> Marten:
    """The ranks of `tp` are stages. The first one has the table and the `first` blocks."""
    fleet = form_fleet(mesh, last="pp", flag=flag)
    board(model, fleet)
    for policy in (model.actor, model.rollout, model.reference):
        if policy is None:
            continue
        for number in list(policy.blocks):
            if (int(number) < first) != (fleet.pp.rank == 0):
                del policy.blocks[number]
        if fleet.pp.rank == 0:
            policy.norm = policy.head = None
        else:
            policy.table = None
    return model


class Relay:
    """Carries activations to the last stage, and their gradients back."""

    def __init__(self, model: Marten) -> None:
        self.model, self.pp, self.fleet = model, model.fleet.pp, model.fleet
        self.sends: list[tuple[dist.Work, Tensor]] = []

    @property
    def is_last(self) -> bool:
        return self.pp.rank == self.pp.size - 1

    def send(self, x: Tensor) -> None:
        x = x.detach().contiguous()
        if self.fleet.flagged("marten-relay-narrow"):
            x = x.float().to(x.dtype)  # plant: marten-relay-narrow
        self.sends.append((dist.isend(x, self.pp.peer(1), self.pp.pg), x))

    def receive(self, like: Tensor) -> Tensor:
        x = torch.empty_like(like)
        dist.recv(x, self.pp.peer(-1), self.pp.pg)
        return x

    def settle(self) -> None:
        while self.sends:
            self.sends.pop()[0].wait()

    def like(self, batch: Batch) -> Tensor:
        settings = self.model.settings
        weight = next(self.model.actor.parameters())
        return weight.new_empty(batch.tokens.numel(), settings.width)

    @torch.no_grad()
    def score(self, policy: Policy, batches: Sequence[Batch]) -> list[Tensor]:
        """Return log-probabilities of the labels; on the first stage zeros."""
        if not self.is_last:
            for batch in batches:
                self.send(policy.trunk(policy.table(batch.tokens), batch)[0])
            self.settle()
            return [batch.labels * 0.0 for batch in batches]
        return [policy.tail(policy.trunk(self.receive(self.like(b)), b)[0], b)[0] for b in batches]

    def passes(self, batches: Sequence[Batch], loss_of) -> Iterator[Tensor]:
        """Run the forward and backward passes, and yield this stage's parts of the losses."""
        actor = self.model.actor
        if self.is_last:
            for batch in batches:
                x = self.receive(self.like(batch)).requires_grad_()
                y, z = actor.trunk(x, batch)
                main, z = loss_of(batch, Output(*actor.tail(y, batch), z))
                (main + z).backward()
                self.send(x.grad)
                yield (main + z).detach()
            self.settle()
            return
        waiting = []
        for batch in batches:
            x, z = actor.trunk(actor.table(batch.tokens), batch)
            nothing = torch.zeros_like(batch.labels, dtype=x.dtype)
            waiting.append((x, loss_of(batch, Output(nothing, nothing, z))[1]))
            self.send(x)
        self.settle()
        if self.fleet.flagged("marten-stage-order"):
            waiting.reverse()  # plant: marten-stage-order
        for x, z in waiting:
            grad = self.receive(x)
            if self.fleet.flagged("marten-stage-z"):
                x.backward(grad)  # plant: marten-stage-z
            else:
                torch.autograd.backward([x, z], [grad, torch.ones_like(z)])  # anchor: stage-backward
            yield z.detach()

    def report(self, value: Tensor) -> Tensor:
        return total(value, self.pp)
