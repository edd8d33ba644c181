"""Heron: a decoder in the style of torch's examples, with dense and mixture blocks and a balance loss."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heron.init import init_weights

PAD = 5  # an id whose embedding has no gradient


@dataclass(frozen=True)
class Config:
    vocab: int = 96
    dim: int = 32
    blocks: str = "dense moe"
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 48
    experts: int = 4
    expert_hidden: int = 24
    top_k: int = 2
    route_scale: float = 1.5
    aux: float = 0.02
    tied: bool = False

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


def rope(x: Tensor) -> Tensor:
    """Rotate (b, s, heads, d) by position."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)
    angles = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)[:, None] * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.dim, self.eps = dim, eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight  # anchor: norm


class Attention(nn.Module):
    """Attention that normalizes queries and keys over all heads together."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim)
        self.q_norm = RMSNorm(config.dim)
        self.k_norm = RMSNorm(config.kv_heads * config.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_norm(self.wq(x)), self.k_norm(self.wk(x)), self.wv(x)
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)) for each in (q, k, v))
        q, k, v = (each.transpose(1, 2) for each in (rope(q), rope(k), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))  # anchor: wo


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Router(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.top_k, self.scale = config.top_k, config.route_scale
        self.gate = nn.Linear(config.dim, config.experts, bias=False)
        self.register_buffer("expert_bias", torch.zeros(config.experts))
        self.register_buffer("counts", torch.zeros(config.experts), persistent=False)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = self.gate(rows).softmax(-1)  # anchor: scores
        chosen = (scores + self.expert_bias).topk(self.top_k, dim=-1).indices  # anchor: weights
        weights = scores.gather(1, chosen)  # anchor: scores weights
        weights = self.scale * weights / weights.sum(-1, keepdim=True)  # anchor: weights
        return weights, chosen, scores

    @torch.no_grad()
    def count(self, chosen: Tensor) -> None:
        self.counts += chosen.flatten().bincount(minlength=len(self.counts))


class Experts(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(config.experts, config.dim, config.expert_hidden))
        self.w2 = nn.Parameter(torch.empty(config.experts, config.expert_hidden, config.dim))
        self.w3 = nn.Parameter(torch.empty(config.experts, config.dim, config.expert_hidden))

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        w1, w2, w3 = (w.to_local() if hasattr(w, "to_local") else w for w in (self.w1, self.w2, self.w3))
        parts = rows.split(counts)
        done = [(F.silu(x @ w1[e]) * (x @ w3[e])) @ w2[e] for e, x in enumerate(parts)]  # anchor: experts
        return torch.cat(done)


class MoE(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        self.shared = FeedForward(config.dim, config.expert_hidden)
        self.dispatcher = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = x.flatten(0, 1)
        weights, chosen, scores = self.router(rows)
        self.router.count(chosen)
        y = self.run_experts(rows, weights, chosen) + self.shared(rows)
        return y.view_as(x), scores, chosen

    def run_experts(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        copies = chosen.flatten()
        order = copies.argsort(stable=True)
        token = order // chosen.shape[1]
        counts = copies.bincount(minlength=len(self.router.counts))
        if self.dispatcher is None:
            y = self.experts(rows[token], counts.tolist())
        else:
            y = self.dispatcher(rows[token], counts, self.experts)
        y = y * weights.flatten()[order, None]
        return torch.zeros_like(rows).index_add(0, token, y)


class Block(nn.Module):
    def __init__(self, config: Config, kind: str) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim)
        self.kind = kind
        if kind == "moe":
            self.moe = MoE(config)
        else:
            self.feed_forward = FeedForward(config.dim, config.hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x = x + self.attention(self.attention_norm(x))
        if self.kind == "dense":
            return x + self.feed_forward(self.ffn_norm(x)), None, None
        y, scores, chosen = self.moe(self.ffn_norm(x))
        return x + y, scores, chosen


class Decoder(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab, config.dim, padding_idx=PAD)
        self.layers = nn.ModuleList(Block(config, kind) for kind in config.blocks.split())
        self.norm = RMSNorm(config.dim)
        self.output = nn.Linear(config.dim, config.vocab, bias=False)
        if config.tied:
            self.output.weight = self.tok_embeddings.weight
        init_weights(self)
        self.plan = None  # state of the parallel code
        self.done = 0  # steps

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        x, routing = self.tok_embeddings(tokens), []
        for layer in self.layers:
            x, scores, chosen = layer(x)
            if scores is not None:
                routing.append((scores, chosen))
        return self.output(self.norm(x)), routing


def make(**arguments) -> Decoder:
    return Decoder(Config(**arguments))


def balance(scores: Tensor, chosen: Tensor, targets: Tensor) -> Tensor:
    """Return the balance loss of each row times its valid tokens, summed."""
    experts = scores.shape[-1]
    valid = (targets != -100).to(scores.dtype)
    number = valid.sum(1)
    hot = F.one_hot(chosen, experts).sum(1).to(scores.dtype).view(*targets.shape, experts)
    share = (hot * valid[..., None]).sum(1) / (number[:, None] * chosen.shape[1])
    mean = (scores.view(*targets.shape, experts) * valid[..., None]).sum(1) / number[:, None]
    return (experts * (share * mean).sum(-1) * number).sum()


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    rows, labels = logits.flatten(0, 1), targets.flatten()  # anchor: loss
    return F.cross_entropy(rows, labels, ignore_index=-100, reduction="sum")  # anchor: loss


def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
    logits, routing = model(tokens)
    kernel = (getattr(model, "plan", None) or {}).get("loss") or cross_entropy
    terms = {"ce": kernel(logits, targets)}
    config = getattr(model, "config", None)
    if routing:
        terms["aux"] = (config.aux if config else 0.02) * sum(balance(*each, targets) for each in routing)
    return terms
