"""The decoder: tied embeddings, packed attention, a dense layer and mixtures of experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from teasel.attention import Attention
from teasel.comm import local, scatter_sum
from teasel.config import ModelConfig
from teasel.dims import SOLO, ParallelDims
from teasel.moe import MoE
from teasel.packing import PackedBatch, pack


class OutputProjection(nn.Module):
    """A linear layer with a bias. Its inputs may be spread over tp; outputs are chunks of the sequence."""

    dims: ParallelDims = SOLO

    def __init__(self, hidden: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, hidden))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        tp, weight, bias = self.dims["tp"], local(self.weight), local(self.bias)
        if self.dims.on("teasel-bias-each-rank"):
            return scatter_sum(F.linear(x, weight, bias), tp, self.dims)  # plant: teasel-bias-each-rank
        return scatter_sum(F.linear(x, weight), tp, self.dims) + bias  # anchor: bias


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = OutputProjection(config.ffn_dim, config.dim)

    def forward(self, x: Tensor, packed: PackedBatch) -> tuple[Tensor, Tensor]:
        y = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return y, y.new_zeros(())


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer_id: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn = MoE(config) if config.is_moe(layer_id) else FeedForward(config)

    def forward(self, x: Tensor, packed: PackedBatch) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x), packed)
        y, aux = self.ffn(self.ffn_norm(x), packed)
        return x + y, aux


class Teasel(nn.Module):
    dims: ParallelDims = SOLO

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): Block(config, i) for i in range(config.n_layers)})
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.tie()
        self.state: object | None = None  # of the optimizer recipe

    def tie(self) -> None:
        self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits, of this rank's slice of the vocabulary, and this rank's part of the auxiliary losses."""
        x, aux = self.run_layers(self.embed(tokens), tokens)
        return self.output(self.norm(x)), aux

    def embed(self, tokens: Tensor) -> Tensor:
        return self.tok_embeddings(tokens) * self.config.dim**0.5

    def run_layers(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        packed = pack(tokens, self.config, self.dims)
        total = x.new_zeros(())
        for layer in self.layers.values():
            x, aux = layer(x, packed)
            total = total + aux
        return x, total


@torch.no_grad()
def init_weights(model: Teasel) -> None:
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, dtype=torch.float64)
        if "norm" in name:
            weight.copy_(1 + 0.2 * noise)
        elif weight.dim() == 1:
            weight.copy_(0.3 * noise)
        else:
            fan = weight.shape[-2] if name.endswith("experts.w2") else weight.shape[-1]
            weight.copy_(noise * fan**-0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape, dtype=torch.float64))


def build(**overrides) -> Teasel:
    model = Teasel(ModelConfig(**overrides))
    init_weights(model)
    return model


def set_dims(model: nn.Module, dims: ParallelDims) -> None:
    for module in model.modules():
        module.dims = dims
