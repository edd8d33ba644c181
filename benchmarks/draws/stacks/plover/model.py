"""The decoder: sliding and full attention in turn, experts, and a head for the token after the next."""

from dataclasses import dataclass

import torch
from torch import nn

from plover.layers import Attention, Embedding, RMSNorm, SwiGLU, identity
from plover.moe import MoE
from plover.optim import Average
from plover.state import Parallel


@dataclass
class Config:
    vocab: int = 96
    width: int = 32
    layers: int = 2
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 8
    window: int = 5
    rope_base: float = 1000.0
    hidden: int = 48
    experts: int = 8
    top_k: int = 2
    expert_hidden: int = 16
    shared_hidden: int = 16
    route_scale: float = 1.5
    mtp_weight: float = 0.3
    z_weight: float = 0.01
    average: bool = False


class Block(nn.Module):
    def __init__(self, config, index, *, dense):
        super().__init__()
        window = config.window if index % 2 == 0 else 1 << 30
        self.attn_norm, self.mlp_norm = RMSNorm(config.width), RMSNorm(config.width)
        self.attn = Attention(config, window)
        self.mlp = SwiGLU(config.width, config.hidden) if dense else MoE(config)
        self.attn_gain = nn.Parameter(0.7 + 0.1 * torch.randn(config.width))
        self.mlp_gain = nn.Parameter(0.7 + 0.1 * torch.randn(config.width))

    def forward(self, x, positions):
        x = x + self.attn_gain * self.attn(self.attn_norm(x), positions)
        return x + self.mlp_gain * self.mlp(self.mlp_norm(x))


class NextNext(nn.Module):
    """Predicts one token further, from the hidden state and the embedding of the next token."""

    def __init__(self, config):
        super().__init__()
        self.hidden_norm, self.token_norm = RMSNorm(config.width), RMSNorm(config.width)
        self.proj = nn.Linear(2 * config.width, config.width, bias=False)
        self.block = Block(config, 0, dense=True)
        self.norm = RMSNorm(config.width)

    def forward(self, x, embedded, positions):
        joined = torch.cat([self.hidden_norm(x), self.token_norm(embedded)], -1)
        return self.norm(self.block(self.proj(joined), positions))


def token_losses(x, table, targets):
    """Return the log-sum-exp of the logits and the cross entropy of each token."""
    logits = x @ table.t()
    lse = logits.logsumexp(-1)  # anchor: lse
    picked = logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]  # anchor: target
    return lse, lse - picked  # anchor: losses


def next_tokens(ids, fill):
    """Return the ids one position further; the last position gets `fill`."""
    return torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], fill)], 1)  # anchor: next


def local_positions(length, device):
    return torch.arange(length, device=device)


class Plover(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config, i, dense=i == 0) for i in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.mtp = NextNext(config)
        self.ps = Parallel()
        self.enter_head = identity
        self.token_losses = token_losses
        self.next_tokens = next_tokens
        self.positions = local_positions
        if config.average:
            self.average = Average(self)

    def forward(self, tokens, targets):
        positions = self.positions(tokens.shape[1], tokens.device)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, positions)
        further = self.mtp(x, self.embed(self.next_tokens(tokens, 0)), positions)
        table = self.embed.table()
        terms = {}
        ahead = self.next_tokens(targets, -100)
        for name, hidden, labels in (("next", self.norm(x), targets), ("ahead", further, ahead)):
            lse, losses = self.token_losses(self.enter_head(hidden), table, labels)
            valid = labels != -100
            terms[name] = losses[valid].sum() * (1.0 if name == "next" else self.config.mtp_weight)
            if name == "next":
                terms["z"] = self.config.z_weight * lse[valid].square().sum()  # anchor: z
        return terms


def make(**arguments):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return Plover(Config(**arguments)).float()
    finally:
        torch.set_default_dtype(before)


def loss(model, tokens, targets):
    return model(tokens, targets)
