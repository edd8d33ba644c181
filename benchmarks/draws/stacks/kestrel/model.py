"""Kestrel: a small decoder with gated grouped-query attention, RoPE and experts in some of its blocks."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kestrel.comm import copy_to, reduce_from


def rotate(x: Tensor, base: float) -> Tensor:
    """Apply rotary positions to (s, b, heads, d)."""
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)
    angles = torch.arange(x.shape[0], dtype=x.dtype, device=x.device)[:, None] * frequencies
    cos, sin = angles.cos()[:, None, None], angles.sin()[:, None, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Linear(nn.Module):
    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width_out, width_in) / math.sqrt(width_in))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class LoRA(nn.Module):
    """A low-rank addition to a projection."""

    def __init__(self, width_in: int, width_out: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, width_in) / math.sqrt(width_in))
        self.up = nn.Parameter(0.02 * torch.randn(width_out, rank))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.down), self.up)


class Attention(nn.Module):
    """Each group of the fused projection is [queries, gates, key, value]."""

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int, lora: int) -> None:
        super().__init__()
        self.per_key = heads // kv_heads
        self.head_dim = head_dim
        self.rope_base = 10000.0
        self.qkv = Linear(width, kv_heads * (2 * self.per_key + 2) * head_dim)
        self.q_norm = RMSNorm(head_dim)
        self.k_norm = RMSNorm(head_dim)
        self.out = Linear(heads * head_dim, width)
        self.adapter = LoRA(width, width, lora) if lora else None
        self.tp = None

    def forward(self, x: Tensor) -> Tensor:
        h = copy_to(x.transpose(0, 1), self.tp)
        fused = self.qkv(h).unflatten(-1, (-1, 2 * self.per_key + 2, self.head_dim))
        q, gate, k, v = fused.split([self.per_key, self.per_key, 1, 1], dim=3)
        q = rotate(self.q_norm(q.flatten(2, 3)), self.rope_base)
        k = rotate(self.k_norm(k.flatten(2, 3)), self.rope_base)
        k = k.repeat_interleave(self.per_key, dim=2)
        v = v.flatten(2, 3).repeat_interleave(self.per_key, dim=2)
        q, k, v = (heads.permute(1, 2, 0, 3) for heads in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3)
        y = (y * torch.sigmoid(gate.flatten(2, 3))).flatten(2)
        y = reduce_from(self.out(y).transpose(0, 1), self.tp)
        return y if self.adapter is None else y + self.adapter(x)


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = Linear(width, hidden)
        self.up = Linear(width, hidden)
        self.down = Linear(hidden, width)
        self.tp = None

    def forward(self, x: Tensor) -> Tensor:
        h = copy_to(x, self.tp)
        return reduce_from(self.down(F.silu(self.gate(h)) * self.up(h)), self.tp)


class Experts(nn.Module):
    def __init__(self, num_experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.w_gate = nn.Parameter(torch.randn(num_experts, width, hidden) / math.sqrt(width))
        self.w_up = nn.Parameter(torch.randn(num_experts, width, hidden) / math.sqrt(width))
        self.w_down = nn.Parameter(torch.randn(num_experts, hidden, width) / math.sqrt(hidden))
        self.storage = None

    def weights(self):
        found = self.storage or (self.w_gate, self.w_up, self.w_down)
        return [each.to_local() if hasattr(each, "to_local") else each for each in found]

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        w_gate, w_up, w_down = self.weights()
        done = []
        for e, part in enumerate(rows.split(counts)):
            done.append((F.silu(part @ w_gate[e]) * (part @ w_up[e])) @ w_down[e])
        return torch.cat(done)

    def batched(self, buffer: Tensor) -> Tensor:
        """Run the experts on a buffer (experts, capacity, width)."""
        w_gate, w_up, w_down = self.weights()
        return (F.silu(buffer @ w_gate) * (buffer @ w_up)) @ w_down


class MoE(nn.Module):
    def __init__(self, width: int, hidden: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.router = Linear(width, num_experts)
        self.experts = Experts(num_experts, width, hidden)
        self.top_k = top_k
        self.tp = None
        self.dispatcher = None

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x.flatten(0, -2))
        weights, chosen = logits.softmax(-1).topk(self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        copies = chosen.flatten()
        order = copies.argsort(stable=True)
        rows = x.flatten(0, -2)[order // self.top_k]
        counts = copies.bincount(minlength=logits.shape[-1])
        if self.dispatcher is None:
            y = self.experts(rows, counts.tolist())
        else:
            y = self.dispatcher(rows, counts, self.experts)
        back = torch.empty_like(y).index_copy(0, order, y).unflatten(0, (-1, self.top_k))
        return (back * weights[..., None]).sum(1).view_as(x)


class Block(nn.Module):
    def __init__(self, kind: str, config: dict) -> None:
        super().__init__()
        width = config["width"]
        self.kind = kind
        self.attention_norm = RMSNorm(width)
        self.attention = Attention(
            width, config["heads"], config["kv_heads"], config["head_dim"], config["lora"]
        )
        self.mlp_norm = RMSNorm(width)
        if kind == "moe":
            self.mlp = MoE(width, config["hidden"], config["num_experts"], config["top_k"])
        else:
            self.mlp = MLP(width, 2 * config["hidden"])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Kestrel(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        width = config["width"]
        self.config = config
        self.embed = nn.Embedding(config["vocab"], width)
        self.marker = config["marker"]
        self.side = Linear(width, width) if self.marker is not None else None
        self.layers = nn.ModuleList(Block(kind, config) for kind in config["kinds"])
        self.norm = RMSNorm(width)
        self.head = Linear(width, config["vocab"])
        self.plan = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.side is not None:
            marked = tokens < self.marker  # image patches have the lowest ids
            if bool(marked.any()):
                x = torch.where(marked[..., None], self.side(x), x)
        return x


def make(
    vocab: int = 98,
    width: int = 32,
    kinds: str = "dense moe",
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    hidden: int = 24,
    num_experts: int = 6,
    top_k: int = 2,
    lora: int = 0,
    marker: int | None = None,
) -> Kestrel:
    config = dict(locals())
    config["kinds"] = kinds.split()
    return Kestrel(config)


def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
