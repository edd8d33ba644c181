"""The decoder: attention and state-space layers, dense MLPs and experts, and a head for the token after next."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bittern.attention import Attention, Rotary
from bittern.averages import Averages
from bittern.config import Config
from bittern.context import shift_left
from bittern.layers import MLP, Layer, RMSNorm, VocabParallelEmbedding, set_state
from bittern.losses import Head
from bittern.moe import MoE
from bittern.packing import Packed, pack
from bittern.parallel_state import ParallelState
from bittern.regions import own_chunk
from bittern.shard import Info, describe
from bittern.ssm import Mixer


class Block(Layer):
    def __init__(self, config: Config, kind: str) -> None:
        super().__init__()
        mixer, mlp = kind.split(":")
        self.input_norm = RMSNorm(config.hidden, config.eps)
        self.mixer = Mixer(config) if mixer == "ssm" else Attention(config, window=mixer == "window")
        self.mlp_norm = RMSNorm(config.hidden, config.eps)
        self.mlp = MoE(config) if mlp == "moe" else MLP(config.hidden, config.ffn, bias=True)

    def mix(self, x: Tensor, packed: Packed, table: tuple[Tensor, Tensor]) -> Tensor:
        return self.mixer(self.input_norm(x), packed, table)

    def feed(self, x: Tensor, packed: Packed) -> Tensor:
        h = self.mlp_norm(x)
        return self.mlp(h, packed) if isinstance(self.mlp, MoE) else self.mlp(h)


class MTP(Layer):
    """Predicts the token after next from the hidden state and the next token."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(config.hidden, config.eps)
        self.embed_norm = RMSNorm(config.hidden, config.eps)
        self.join = nn.Parameter(torch.empty(config.hidden, 2 * config.hidden))
        self.block = Block(config, "window:dense")
        self.norm = RMSNorm(config.hidden, config.eps)

    def forward(self, h: Tensor, following: Tensor) -> Tensor:
        return F.linear(torch.cat([self.hidden_norm(h), self.embed_norm(following)], -1), self.join)


class Bittern(Layer):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = VocabParallelEmbedding(config.vocab, config.hidden)
        self.rotary = Rotary(config.head_dim)
        self.layers = nn.ModuleList([Block(config, kind) for kind in config.kinds])
        self.final_norm = RMSNorm(config.hidden, config.eps)
        self.head = Head(config.smoothing)
        self.mtp = MTP(config)
        self.current: Packed | None = None
        self.run: object = None
        self.infos: dict[str, Info] = {}
        self.tie()

    def tie(self) -> None:
        self.head.tied = [self.embedding.weight]

    def prepare(self, tokens: Tensor, targets: Tensor) -> Packed:
        self.current = pack(tokens, targets, self.config, self.ps)
        return self.current

    def forward(self, tokens: Tensor, targets: Tensor, packed: Packed | None = None) -> dict[str, Tensor]:
        """Return the losses of this rank's positions, summed over valid targets."""
        packed = packed or self.prepare(tokens, targets)
        table = self.rotary(packed.positions)
        x = self.embedding(tokens) * self.config.hidden**0.5
        x = x + self.noise(x, packed)
        for index, block in enumerate(self.layers):
            x = self.run_block(block, x, packed, table, recompute=index in self.config.recomputed)
        loss = self.head(self.final_norm(x), targets)
        return {"lm": loss, "mtp": self.predict_next(x, tokens, targets, packed, table)}

    def run_block(self, block: Block, x: Tensor, packed: Packed, table, *, recompute: bool = False) -> Tensor:
        if not recompute:
            x = x + block.mix(x, packed, table)
        elif self.ps.mode == "bittern-recompute-current":
            x = x + checkpoint(
                lambda y: block.mix(y, self.current, table), x, use_reentrant=False
            )  # plant: bittern-recompute-current
        else:
            x = x + checkpoint(block.mix, x, packed, table, use_reentrant=False)  # anchor: recompute
        return x + block.feed(x, packed)

    def noise(self, x: Tensor, packed: Packed) -> Tensor:
        """Return noise that depends on the place in the row alone."""
        generator = torch.Generator().manual_seed(20)
        length = packed.length  # anchor: noise
        if self.ps.mode == "bittern-noise-local":
            length = packed.positions.shape[1]  # plant: bittern-noise-local
        table = torch.randn(length, 1, x.shape[-1], generator=generator, dtype=torch.float64)
        if len(table) > packed.positions.shape[1]:
            table = table[packed.own]
        if self.ps.sequence_parallel:
            table = own_chunk(table, self.ps.tp)
        return self.config.noise * table.to(x.dtype)

    def predict_next(self, h: Tensor, tokens: Tensor, targets: Tensor, packed: Packed, table) -> Tensor:
        cp = self.ps.cp
        if self.ps.mode == "bittern-mtp-roll":
            following = self.embedding(tokens).roll(-1, 0)  # plant: bittern-mtp-roll
        else:
            following = self.embedding(shift_left(tokens, 0, cp))  # anchor: mtp-shift
        x = self.run_block(self.mtp.block, self.mtp(h, following), packed, table)
        return self.head(self.mtp.norm(x), shift_left(targets, -100, cp))

    @property
    def routers(self) -> list:
        return [block.mlp.router for block in self.layers if isinstance(block.mlp, MoE)]


@torch.no_grad()
def init_weights(model: nn.Module) -> None:
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, dtype=torch.float64)
        leaf = name.rsplit(".", 1)[-1]
        if "norm" in name or leaf in ("gain", "skip"):
            weight.copy_(1 + 0.2 * noise)
        elif weight.dim() == 1:
            weight.copy_(0.3 * noise)
        else:
            weight.copy_(noise * weight.shape[-1] ** -0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape, dtype=torch.float64))


def build(**sizes) -> Bittern:
    model = Bittern(Config(**sizes))
    init_weights(model)
    set_state(model, ParallelState())
    model.infos = {name: describe(name) for name, _ in model.named_parameters()}
    if model.config.ema:
        model.averages = Averages()
        model.averages.start(model)
    return model


def loss(model: Bittern, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return model(tokens, targets)
