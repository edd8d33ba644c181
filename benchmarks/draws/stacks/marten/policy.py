"""The policy, and the models around it: one to stay close to, and one that made the responses."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from marten.attention import Attention
from marten.comms import enter
from marten.experts import Mixture, Router
from marten.fleet import Piece
from marten.layers import MLP, Norm, Projection, Table, without_adapters
from marten.logprobs import score_labels
from marten.packing import Batch, unpack
from marten.settings import Settings


class Output(NamedTuple):
    log_probs: Tensor  # (rows, positions) of the labels
    entropy: Tensor
    z: Tensor  # this rank's part of the z losses


class Block(Piece):
    def __init__(self, settings: Settings, kind: str) -> None:
        super().__init__()
        self.attention_norm, self.attention = Norm(settings), Attention(settings)
        self.feed_norm = Norm(settings)
        self.feed = Mixture(settings) if kind == "m" else MLP(settings)

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor | float]:
        x = x + self.attention(self.attention_norm(x), batch)
        y = self.feed(self.feed_norm(x))
        y, z = y if isinstance(self.feed, Mixture) else (y, 0.0)
        return x + y, z


class Policy(Piece):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.table = Table(settings)
        self.blocks = nn.ModuleDict({str(i): Block(settings, kind) for i, kind in enumerate(settings.blocks)})
        self.norm = Norm(settings)
        self.head = Projection(settings.width, settings.vocab, settings)

    def trunk(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        z = x.new_zeros(())
        for block in self.blocks.values():
            x, more = block(x, batch)
            z = z + more
        return x, z

    def tail(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.head(enter(self.norm(x), self.fleet)) / self.settings.temperature
        found = score_labels(logits, batch.labels.flatten(), self.fleet)
        log_probs, entropy = (each.view_as(batch.labels) for each in found)
        return log_probs, entropy

    def forward(self, batch: Batch) -> Output:
        x, z = self.trunk(self.table(batch.tokens), batch)
        return Output(*self.tail(x, batch), z)

    @property
    def routers(self) -> list[Router]:
        return [module for module in self.modules() if isinstance(module, Router)]


class Marten(Piece):
    """All models of a run. With adapters the reference is the actor without them."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.actor = Policy(settings)
        self.optim: object = None
        self.n_steps = 0
        self.partial: set[str] = set()

    def add_copies(self) -> None:
        self.rollout = self.copy_actor()
        self.reference = None if self.settings.lora else self.copy_actor()

    def copy_actor(self) -> Policy:
        """Return weights near those of the actor, as of another time in the run."""
        other = copy.deepcopy(self.actor).requires_grad_(False)
        for weight in other.parameters():
            weight.mul_(1 + 0.1 * torch.randn(weight.shape, dtype=torch.float64))
        return other

    @torch.no_grad()
    def ask_reference(self, ask):
        if self.reference is not None:
            return ask(self.reference)
        with without_adapters(self.actor):
            return ask(self.actor)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.actor(unpack(tokens, targets, self.settings, self.fleet)).log_probs


@torch.no_grad()
def draw_weights(model: nn.Module) -> None:
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, dtype=torch.float64)
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "gain":
            weight.copy_(1 + 0.2 * noise)
        elif weight.dim() == 1:
            weight.copy_(0.4 * noise)
        elif leaf == "up":
            weight.copy_(0.1 * noise)
        else:
            weight.copy_(noise * weight.shape[-1] ** -0.5)
    for router in model.routers:
        router.bias.copy_(0.1 * torch.randn(router.bias.shape, dtype=torch.float64))


def build(**changes) -> Marten:
    model = Marten(Settings(**changes))
    draw_weights(model.actor)
    with torch.no_grad():
        model.add_copies()
    if model.settings.lora:
        for name, weight in model.actor.named_parameters():
            weight.requires_grad_(is_adapter(name))
    return model


def is_adapter(name: str) -> bool:
    return name.endswith((".down", ".up"))


def loss(model: Marten, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of fine-tuning on all tokens."""
    return -model(tokens, targets).masked_fill(targets < 0, 0.0)
