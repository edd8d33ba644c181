"""AdamW of which each rank keeps the moments of its own part of every weight."""

from __future__ import annotations

import torch
from torch import Tensor

from marten.clip import norm_of
from marten.comms import collapse, collect, total
from marten.fleet import Crew
from marten.gradsync import is_expert, sum_partial, trained
from marten.placement import cut_of
from marten.policy import Marten


class Part:
    """This rank's part of a weight, as a run of its padded values, at least in float32."""

    def __init__(self, weight: Tensor, crew: Crew, rank: int) -> None:
        self.weight, self.crew = weight, crew
        self.size = -(-weight.numel() // crew.size)
        self.own = slice(rank * self.size, (rank + 1) * self.size)
        self.wide = torch.promote_types(weight.dtype, torch.float32)
        empty = weight.new_zeros(self.size, dtype=self.wide)
        self.grad, self.first, self.second = empty, empty.clone(), empty.clone()

    def flat(self, x: Tensor) -> Tensor:
        x = x.detach().flatten().to(self.wide)
        return torch.cat([x, x.new_zeros(self.size * self.crew.size - len(x))])

    def shape(self, flat: Tensor) -> Tensor:
        return flat[: self.weight.numel()].view_as(self.weight).to(self.weight.dtype)

    def whole(self, own: Tensor) -> Tensor:
        return self.shape(collect(own, self.crew))


class ShardedAdamW:
    def __init__(self, model: Marten) -> None:
        self.model, self.fleet, self.n_steps = model, model.fleet, 0
        self.parts = {name: self.make_part(name, weight) for name, weight in trained(model).items()}

    def make_part(self, name: str, weight: Tensor) -> Part:
        fleet = self.fleet
        crew = fleet.twins if is_expert(name) else fleet.tokens
        rank = crew.rank  # anchor: part-rank
        if fleet.flagged("marten-part-rank"):
            rank = fleet.rows.rank % crew.size  # plant: marten-part-rank
        return Part(weight, crew, rank)

    @torch.no_grad()
    def take(self) -> None:
        """Add the gradients of a micro-batch to those of this rank's parts."""
        sum_partial(self.model)
        for part in self.parts.values():
            summed = collapse(part.flat(part.weight.grad), part.crew)
            if self.fleet.flagged("marten-take-last"):
                part.grad.copy_(summed)  # plant: marten-take-last
            else:
                part.grad += summed  # anchor: take
            part.weight.grad = None

    def norm(self) -> Tensor:
        squares = {}
        for name, part in self.parts.items():
            square = part.grad.square().sum()
            crew = part.crew  # anchor: norm-parts
            if self.fleet.flagged("marten-norm-parts"):
                crew = self.fleet.rows  # plant: marten-norm-parts
            squares[name] = total(square, crew)
        return norm_of(self.model, squares)

    def size_of(self, name: str, part: Part) -> Tensor:
        """Return the root mean square of a weight, by which its steps are scaled."""
        fleet = self.fleet
        mean = part.weight.detach().to(part.wide).square().mean()
        if is_expert(name):
            mean = total(mean, fleet.ep) / fleet.ep.size
        if cut_of(name) is not None and not fleet.flagged("marten-size-cut"):  # plant: marten-size-cut
            mean = total(mean, fleet.tp) / fleet.tp.size  # anchor: size-cut
        return mean.sqrt()

    @torch.no_grad()
    def prepare(self, limit: float) -> tuple[Tensor, Tensor]:
        """Put updates where the optimizer that subtracts them takes gradients."""
        settings = self.model.settings
        norm = self.norm()
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        self.n_steps += 1
        warm = min(1.0, self.n_steps / settings.warmup)
        for name, part in self.parts.items():
            part.first.lerp_(part.grad * factor, 1 - settings.beta1)
            part.second.lerp_((part.grad * factor).square(), 1 - settings.beta2)
            root = (part.second / (1 - settings.beta2**self.n_steps)).sqrt() + 1e-8
            update = part.first / (1 - settings.beta1**self.n_steps) / root
            if part.weight.dim() > 1:
                update = update + settings.decay * part.flat(part.weight)[part.own]
                update = update * self.size_of(name, part)
            whole = part.whole(warm * update)  # anchor: update
            if self.fleet.flagged("marten-update-order"):
                turned = (
                    collect(warm * update, part.crew).view(part.crew.size, -1).roll(1, 0)
                )  # plant: marten-update-order
                whole = part.shape(turned.flatten())  # plant: marten-update-order
            part.weight.grad = whole
            part.grad.zero_()
        return norm, factor
