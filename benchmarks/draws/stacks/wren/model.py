"""The model, and which of its dims are spread over ranks."""

import torch
from torch import nn

from wren.attention import Attention
from wren.experts import Dense, Router, Sparse
from wren.rows import read
from wren.settings import Settings
from wren.vocab import Embedding, Head
from wren.world import World

DIMS = {
    "embed.weight": ("vocab", "width"),
    "head.weight": ("vocab", "width"),
    "attention.qkv": ("heads", "slot", "channel", "width"),
    "attention.sub_gain": ("heads", "channel"),
    "attention.out": ("heads", "channel", "width"),
    "mlp.up": ("two", "hidden", "width"),
    "mlp.down": ("hidden", "width"),
    "shared.up": ("two", "hidden", "width"),
    "shared.down": ("hidden", "width"),
    "experts.up": ("experts", "two", "hidden", "width"),
    "experts.down": ("experts", "hidden", "width"),
}
"""Names of the dims of parameters by the end of their name. The dims of others are all whole."""

SPREAD = {"vocab": "tp", "heads": "tp", "hidden": "tp", "experts": "ep"}
"""The team over which a dim is spread."""


def cuts_of(name):
    """Return {team: dim} of a parameter."""
    dims = DIMS.get(".".join(name.split(".")[-2:]), ())
    return {SPREAD[dim]: i for i, dim in enumerate(dims) if dim in SPREAD}


class Block(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        self.attention = Attention(c, layer)
        self.feed = Dense(c) if c.is_dense(layer) else Sparse(c, layer)

    def forward(self, x, plan):
        x = x + self.attention(x, plan)
        y, terms = self.feed(x, plan)
        return x + y, terms


class Wren(nn.Module):
    world = World()

    def __init__(self, c):
        super().__init__()
        self.c, self.run = c, None
        self.embed = Embedding(c)
        self.blocks = nn.ModuleDict({str(layer): Block(c, layer) for layer in range(c.layers)})
        self.head = Head(c)

    def routers(self):
        return [module for module in self.modules() if isinstance(module, Router)]

    def stage(self, tokens, targets, entry=None):
        """Run the layers of this rank. Returns the stream, and the terms of the loss that arise in them."""
        plan = read(tokens, self.c, self.world)
        x = self.embed(tokens) if entry is None else entry
        terms = {}
        for block in self.blocks.values():
            x, more = block(x, plan)
            for name, value in more.items():
                terms[name] = terms.get(name, 0.0) + value
        if self.head is not None:
            terms |= self.head(x, targets)
        return x, terms

    def forward(self, tokens, targets):
        """Return the terms of the loss, summed over tokens of this rank."""
        return self.stage(tokens, targets)[1]


@torch.no_grad()
def draw(model):
    """Draw parameters: gains near 1, matrices with the width of their inputs."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, dtype=torch.float64)
        is_gain = name.endswith(("norm", "gain"))
        fan = parameter.shape[-2] if name.endswith("down") else parameter.shape[-1]
        if name.endswith("attention.out"):
            fan = parameter.shape[0] * parameter.shape[1]
        parameter.copy_(1 + 0.1 * noise if is_gain else noise * fan**-0.5)
    for router in model.routers():
        router.bias.copy_(0.1 * torch.randn(router.bias.shape, dtype=torch.float64))


def build(**changes):
    model = Wren(Settings(**changes))
    draw(model)
    return model


def loss(model, tokens, targets):
    return model(tokens, targets)


def install(model, world):
    for module in model.modules():
        module.world = world
