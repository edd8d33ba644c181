"""The language model, its averaged copy, and the factory."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dunlin.batch import Batch, prepare
from dunlin.config import Config
from dunlin.latent import LatentAttention
from dunlin.moe import ExpertLayer, Router
from dunlin.recurrence import GatedRecurrence
from dunlin.topo import Part
from dunlin.vocab import TiedEmbedding
from dunlin.wire import close_region, open_region


class RMSNorm(Part):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.eps, self.gain = config.eps, nn.Parameter(torch.empty(config.width))

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.gain


class DenseLayer(Part):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(2, config.mlp, config.width))
        self.down = nn.Parameter(torch.empty(config.width, config.mlp))

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        gate, value = torch.einsum("tbd,gid->gtbi", open_region(x, self.topo), self.up)
        return close_region((F.silu(gate) * value) @ self.down.t(), self.topo), 0.0


class Block(Part):
    def __init__(self, config: Config, kinds: str) -> None:
        super().__init__()
        mixers = {"r": GatedRecurrence, "a": LatentAttention}
        self.norm1, self.mixer = RMSNorm(config), mixers[kinds[0]](config)
        self.norm2 = RMSNorm(config)
        self.feed = ExpertLayer(config) if kinds[1] == "e" else DenseLayer(config)

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor | float]:
        x = x + self.mixer(self.norm1(x), batch)
        y, loss = self.feed(self.norm2(x))
        return x + y, loss


class Ahead(Part):
    """Prepares the prediction of the token after the next, from the stream and the next token."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.stream_norm, self.token_norm = RMSNorm(config), RMSNorm(config)
        self.join = nn.Parameter(torch.empty(config.width, 2 * config.width))
        self.feed_norm, self.feed = RMSNorm(config), DenseLayer(config)

    def forward(self, x: Tensor, following: Tensor) -> Tensor:
        x = F.linear(torch.cat([self.stream_norm(x), self.token_norm(following)], -1), self.join)
        return x + self.feed(self.feed_norm(x))[0]


class Net(Part):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = TiedEmbedding(config)
        kinds = config.layers.split()
        self.blocks = nn.ModuleDict({str(i): Block(config, kind) for i, kind in enumerate(kinds)})
        self.norm, self.ahead = RMSNorm(config), Ahead(config)

    def trunk(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        balance = x.new_zeros(())
        for block in self.blocks.values():
            x, more = block(x, batch)
            balance = balance + more
        return x, balance

    def tail(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return weighted sums over this rank's tokens: of the loss, and of that of the token after the next."""
        main = (self.embed.losses(self.norm(x), batch.targets) * batch.weights).sum()
        further = self.ahead(x, self.embed(batch.next_tokens))
        return main, (self.embed.losses(self.norm(further), batch.ahead) * batch.ahead_weights).sum()

    @property
    def routers(self) -> list[Router]:
        return [module for module in self.modules() if isinstance(module, Router)]


class Dunlin(Part):
    """`average` follows the weights of `net`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.net = config, Net(config)
        self.average: Net | None = None
        self.steps, self.partial = 0, set()
        self.engine: object = None

    def prepare(self, tokens: Tensor, targets: Tensor) -> Batch:
        dtype = self.net.embed.weight.dtype
        return prepare(tokens, targets, self.config.losses, self.topo, dtype)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each token (rows, positions)."""
        batch = self.prepare(tokens, targets)
        x, _ = self.net.trunk(self.net.embed(batch.tokens), batch)
        return self.net.embed.losses(self.net.norm(x), batch.targets, z=0.0).t()


@torch.no_grad()
def initialize(net: Net) -> None:
    for name, weight in net.named_parameters():
        noise = torch.randn(weight.shape, dtype=torch.float64)
        leaf = name.rpartition(".")[2]
        if leaf.endswith("gain"):
            weight.copy_(1 + 0.1 * noise)
        elif leaf == "pace":
            weight.copy_(torch.linspace(-2.0, 1.0, len(weight), dtype=torch.float64))
        else:
            weight.copy_(noise * weight.shape[-1] ** -0.5)
    for router in net.routers:
        router.bias.copy_(0.1 * torch.randn(router.bias.shape, dtype=torch.float64))


def make(**changes) -> Dunlin:
    model = Dunlin(replace(Config(), **changes))
    initialize(model.net)
    model.average = copy.deepcopy(model.net).requires_grad_(False)
    return model


def loss(model: Dunlin, tokens: Tensor, targets: Tensor) -> Tensor:
    return model(tokens, targets).masked_fill(targets < 0, 0.0)
