"""A decoder with latent attention and experts, and a further block that predicts the token after the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from osier.attention import LatentAttention, Norm, matrix
from osier.data import next_in_row, read_stream
from osier.dims import ParallelDims
from osier.ema import Shadow
from osier.moe import FeedForward, MoE
from osier.ops import VocabLoss, from_tensor_region, to_tensor_region


@dataclass
class Config:
    vocab: int = 96
    special: int = 8
    width: int = 32
    layers: int = 2
    dense_layers: int = 1
    heads: int = 4
    nope: int = 8
    rope: int = 4
    value: int = 8
    q_rank: int = 24
    kv_rank: int = 16
    rope_base: float = 500.0
    hidden: int = 48
    experts: int = 8
    groups: int = 4
    top_groups: int = 2
    top_k: int = 3
    expert_hidden: int = 16
    shared_hidden: int = 16
    route_scale: float = 1.8
    balance_coef: float = 0.05
    z_coef: float = 0.01
    mtp_coef: float = 0.3
    rows_per_pass: int = 0
    ema: bool = False


class Layer(nn.Module):
    def __init__(self, c: Config, *, dense: bool):
        super().__init__()
        self.norm_in, self.norm_mid = Norm(c.width), Norm(c.width)
        self.attention = LatentAttention(c)
        self.ffn = FeedForward(c.width, c.hidden) if dense else MoE(c)

    def forward(self, x, stream):
        x = x + self.attention(self.norm_in(x), stream)
        return x + self.ffn(self.norm_mid(x))


class Vocabulary(nn.Module):
    """The table of the input, of which each rank of `tp` has some rows."""

    dims = ParallelDims()

    def __init__(self, c: Config):
        super().__init__()
        self.table = nn.Parameter(torch.randn(c.vocab, c.width) * 0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        tp, rows = self.dims.tp, self.table.shape[0]
        if tp.alone:
            return F.embedding(ids, self.table)
        local = ids - tp.rank * rows
        outside = (local < 0) | (local >= rows)
        found = F.embedding(local.masked_fill(outside, 0), self.table)  # anchor: found
        if not self.dims.has("osier-embed-outside"):  # plant: osier-embed-outside
            found = found.masked_fill(outside[..., None], 0.0)
        return from_tensor_region(found, self.dims)


class Head(nn.Module):
    """Logits of this rank's rows of the vocabulary, and the losses of tokens."""

    dims = ParallelDims()

    def __init__(self, c: Config):
        super().__init__()
        self.weight = matrix(c.vocab, c.width)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = to_tensor_region(x, self.dims) @ self.weight.t()
        return VocabLoss.apply(logits, targets, self.dims)


class Ahead(nn.Module):
    """The block for the token after the next: the hidden state beside the embedding of the next token."""

    def __init__(self, c: Config):
        super().__init__()
        self.norm_hidden, self.norm_token, self.norm_out = Norm(c.width), Norm(c.width), Norm(c.width)
        self.join = matrix(c.width, 2 * c.width)
        self.layer = Layer(c, dense=False)

    def forward(self, x, embedded, stream):
        both = torch.cat([self.norm_hidden(x), self.norm_token(embedded)], -1)
        return self.norm_out(self.layer(both @ self.join.t(), stream))


class Osier(nn.Module):
    dims = ParallelDims()

    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        self.embed = Vocabulary(c)
        self.layers = nn.ModuleList(Layer(c, dense=i < c.dense_layers) for i in range(c.layers))
        self.norm = Norm(c.width)
        self.head = Head(c)
        self.ahead = Ahead(c)
        if c.ema:
            self.ema = Shadow(self)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the terms of the loss, each a sum over the tokens of this rank."""
        stream = read_stream(tokens, self.c.special, self.dims)
        x = self.trunk(self.embed(tokens), stream)
        return {**self.head_terms(x, tokens, targets, stream), "balance": self.balance()}

    def trunk(self, x, stream):
        for layer in self.layers:
            x = layer(x, stream)
        return x

    def balance(self) -> torch.Tensor:
        return sum(module.balance for module in self.modules() if isinstance(module, MoE))

    def head_terms(self, x, tokens, targets, stream) -> dict[str, torch.Tensor]:
        c, dims = self.c, self.dims
        lse, losses = self.head(self.norm(x), targets)
        valid = targets != -100
        terms = {"next": losses[valid].sum(), "z": c.z_coef * lse[valid].square().sum()}
        further = self.ahead(x, self.embed(next_in_row(tokens, 0, dims)), stream)
        labels = next_in_row(targets, -100, dims)
        _, losses = self.head(further, labels)
        ahead = valid if dims.has("osier-ahead-mask") else labels != -100  # plant: osier-ahead-mask
        terms["ahead"] = c.mtp_coef * losses[ahead].sum()
        return terms


def build(**arguments) -> Osier:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return Osier(Config(**arguments)).float()
    finally:
        torch.set_default_dtype(before)


def loss(model: Osier, tokens: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    return model(tokens, targets)
