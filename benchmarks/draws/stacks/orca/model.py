"""Orca: a decoder for packed documents, with windowed layers, rotary positions, routed and shared experts."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orca.packing import Context, pack


@dataclass(frozen=True)
class Config:
    vocab: int = 96
    width: int = 32
    blocks: str = "dense moe"
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    hidden: int = 24
    experts: int = 4
    top_k: int = 2
    route_scale: float = 1.5
    window: int = 6  # in every second block; 0 is none
    tied: bool = False
    rope_base: float = 1000.0
    rope_factor: float = 0.0  # of YaRN
    rope_original: int = 8
    latent: int = 0  # width of the latent of keys and values
    decay: bool = False
    dropout: float = 0.0


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight  # anchor: norm


class Linear(nn.Module):
    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width_out, width_in) / math.sqrt(width_in))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)  # anchor: linear


def list_frequencies(dim: int, config: Config) -> tuple[Tensor, float]:
    """Return the frequencies of rotary pairs, and the factor of cosines and sines."""
    inverse = config.rope_base ** (-torch.arange(0, dim, 2) / dim)
    if not config.rope_factor:
        return inverse, 1.0
    turns = config.rope_original * inverse / (2 * math.pi)
    keep = ((turns - 0.25) / 0.75).clamp(0, 1)
    return inverse * keep + inverse / config.rope_factor * (1 - keep), 0.1 * math.log(config.rope_factor) + 1


class Rotary(nn.Module):
    def __init__(self, dim: int, config: Config) -> None:
        super().__init__()
        inverse, self.scale = list_frequencies(dim, config)
        self.register_buffer("inv_freq", inverse, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].to(self.inv_freq.dtype) * self.inv_freq  # anchor: angles
        return angles.cos() * self.scale, angles.sin() * self.scale  # anchor: angles


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (b, s, heads, d) by cosines and sines of (b, s, d / 2)."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, :, None].to(x.dtype), sin[:, :, None].to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)  # anchor: rotate


class Decay(nn.Module):
    """A distance penalty with a learned rate per head."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.log_rate = nn.Parameter(torch.randn(heads) - 2)

    def forward(self, distance: Tensor) -> Tensor:
        return (-self.log_rate.exp()[:, None, None] * distance.clamp(min=0)).to(distance.dtype)


class Attention(nn.Module):
    def __init__(self, config: Config, window: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.window = window
        self.wq = Linear(config.width, config.heads * config.head_dim)
        self.wk = Linear(config.width, config.kv_heads * config.head_dim)
        self.wv = Linear(config.width, config.kv_heads * config.head_dim)
        self.wo = Linear(config.heads * config.head_dim, config.width)
        self.q_norm = RMSNorm(config.head_dim)
        self.k_norm = RMSNorm(config.head_dim)
        self.decay = Decay(config.heads) if config.decay else None

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], context: Context) -> Tensor:
        q = self.wq(x).unflatten(-1, (self.heads, self.head_dim))  # anchor: queries
        k = self.wk(x).unflatten(-1, (self.kv_heads, self.head_dim))
        v = self.wv(x).unflatten(-1, (self.kv_heads, self.head_dim))  # anchor: values
        q, k = rotate(self.q_norm(q), *rope), rotate(self.k_norm(k), *rope)  # anchor: rotate
        return self.wo(self.attend(q, k, v, context).flatten(2))  # anchor: merge

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        mask = context.mask(self.window)[:, None]  # anchor: mask
        if self.decay is not None:
            distance = (context.places[:, None] - context.places).to(q.dtype)
            mask = self.decay(distance).masked_fill(~mask, float("-inf"))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)  # anchor: attention
        return y.transpose(1, 2)  # anchor: merge


class LatentAttention(nn.Module):
    """Attention with keys and values from one latent; a part of each key is rotary and shared by heads."""

    def __init__(self, config: Config, window: int) -> None:
        super().__init__()
        self.heads, self.nope, self.rope = config.heads, config.head_dim, config.head_dim
        self.latent, self.window = config.latent, window
        self.wq = Linear(config.width, self.heads * (self.nope + self.rope))
        self.wkv_a = Linear(config.width, config.latent + self.rope)
        self.kv_norm = RMSNorm(config.latent)
        self.wkv_b = Linear(config.latent, self.heads * 2 * self.nope)
        self.wo = Linear(self.heads * self.nope, config.width)
        self.scale = (self.nope + self.rope) ** -0.5
        if config.rope_factor:
            self.scale *= (0.1 * math.log(config.rope_factor) + 1) ** 2

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], context: Context) -> Tensor:
        q = self.wq(x).unflatten(-1, (self.heads, self.nope + self.rope))
        q_nope, q_rope = q.split([self.nope, self.rope], -1)
        latent, k_rope = self.wkv_a(x).split([self.latent, self.rope], -1)
        kv = self.wkv_b(self.kv_norm(latent)).unflatten(-1, (self.heads, 2 * self.nope))
        k_nope, v = kv.chunk(2, -1)
        k_rope = rotate(k_rope[:, :, None], *rope).expand(-1, -1, self.heads, -1)
        q = torch.cat([q_nope, rotate(q_rope, *rope)], -1).transpose(1, 2)
        k = torch.cat([k_nope, k_rope], -1).transpose(1, 2)
        mask = context.mask(self.window)[:, None]
        v = v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)  # anchor: attention
        return self.wo(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = Linear(width, hidden)
        self.up = Linear(width, hidden)
        self.down = Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # anchor: swiglu


class Router(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.top_k, self.scale = config.top_k, config.route_scale
        self.gate = Linear(config.width, config.experts)
        self.register_buffer("expert_bias", 0.1 * torch.randn(config.experts))
        self.register_buffer("counts", torch.zeros(config.experts), persistent=False)

    def forward(self, rows: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weights and ids of the chosen experts, and the squared log-sum-exp of the logits."""
        logits = self.gate(rows)
        scores = logits.sigmoid()
        chosen = (scores + self.expert_bias).topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, chosen)
        weights = self.scale * weights / weights.sum(-1, keepdim=True)
        z = logits.logsumexp(-1).square()
        if real is not None:
            weights, z = weights * real[:, None], z * real
        return weights, chosen, z

    def count(self, chosen: Tensor, real: Tensor | None) -> None:
        """Add the choices of a micro-batch to the counts of this step."""
        if real is not None:
            chosen = chosen[real]
        self.counts += chosen.flatten().bincount(minlength=len(self.counts))


class Experts(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        shape = (config.experts, config.width, config.hidden)
        self.w_gate = nn.Parameter(torch.randn(*shape) / math.sqrt(config.width))
        self.w_up = nn.Parameter(torch.randn(*shape) / math.sqrt(config.width))
        self.w_down = nn.Parameter(torch.randn(shape[0], shape[2], shape[1]) / math.sqrt(config.hidden))

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        gate, up, down = (w.to_local() if hasattr(w, "to_local") else w for w in self.parameters())
        parts = rows.split(counts)
        return torch.cat([(F.silu(x @ gate[e]) * (x @ up[e])) @ down[e] for e, x in enumerate(parts)])


class MoE(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        self.shared = MLP(config.width, config.hidden)
        self.shared_gate = Linear(config.width, 1)
        self.dispatcher = None

    def forward(self, x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        rows = x.flatten(0, 1)
        weights, chosen, z = self.router(rows, None if real is None else real.flatten())
        if self.training:
            self.router.count(chosen, None if real is None else real.flatten())
        routed = self.run_experts(rows, weights, chosen)
        shared = self.shared(rows) * self.shared_gate(rows).sigmoid()  # anchor: shared
        return (routed + shared).view_as(x), z  # anchor: shared

    def run_experts(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        copies = chosen.flatten()
        order = copies.argsort(stable=True)
        token = order // chosen.shape[1]
        counts = copies.bincount(minlength=len(self.router.counts))
        if self.dispatcher is None:
            y = self.experts(rows[token], counts.tolist())
        else:
            y = self.dispatcher(rows[token], counts, self.experts)
        y = y * weights.flatten()[order, None]  # anchor: combine
        return torch.zeros_like(rows).index_add(0, token, y)  # anchor: combine


class Block(nn.Module):
    def __init__(self, config: Config, kind: str, window: int) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.width)
        self.attn = LatentAttention(config, window) if config.latent else Attention(config, window)
        self.ffn_norm = RMSNorm(config.width)
        if kind == "moe":
            self.moe = MoE(config)
        else:
            self.mlp = MLP(config.width, 2 * config.hidden)
        self.kind, self.dropout = kind, config.dropout

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], context: Context) -> tuple[Tensor, Tensor]:
        x = x + self.drop(self.attn(self.attn_norm(x), rope, context), context)  # anchor: residual
        if self.kind == "moe":
            y, z = self.moe(self.ffn_norm(x), context.real)
        else:
            y, z = self.mlp(self.ffn_norm(x)), x.new_zeros(())
        return x + y, z  # anchor: residual

    def drop(self, y: Tensor, context: Context) -> Tensor:
        if not self.dropout or context.draw is None:
            return y
        return y * context.dropped(self.dropout).to(y.dtype)  # anchor: dropout


class Decoder(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.width)
        nn.init.normal_(self.embed.weight, 0.0, 0.5)
        self.rotary = Rotary(config.head_dim, config)
        kinds = config.blocks.split()
        self.blocks = nn.ModuleList(
            Block(config, kind, config.window if i % 2 else 0) for i, kind in enumerate(kinds)
        )
        self.norm = RMSNorm(config.width)
        self.head = Linear(config.width, config.vocab)
        if config.tied:
            self.head.weight = self.embed.weight
        self.done = 0  # steps, of a custom training step
        self.plan = None  # state of the parallel code

    def forward(self, tokens: Tensor, context: Context | None = None) -> tuple[Tensor, Tensor]:
        """Return logits, and the z terms of all tokens."""
        if context is None:
            context = self.make_context(tokens)
        x = self.embed(tokens)  # anchor: embed
        rope = self.rotary(context.positions)
        z = x.new_zeros(())
        for block in self.blocks:
            x, more = self.run_block(block, x, rope, context)  # anchor: blocks
            z = z + more.sum()
        return self.head(self.norm(x)), z  # anchor: head

    def make_context(self, tokens: Tensor) -> Context:
        return pack(tokens)

    def run_block(self, block: Block, x: Tensor, rope, context: Context) -> tuple[Tensor, Tensor]:
        return block(x, rope, context)


def make(**arguments) -> Decoder:
    return Decoder(Config(**arguments))


def loss(
    model: nn.Module, tokens: Tensor, targets: Tensor, context: Context | None = None
) -> dict[str, Tensor]:
    """Return the cross entropy and the z loss, summed over tokens."""
    logits, z = model(tokens) if context is None else model(tokens, context)
    kernel = (getattr(model, "plan", None) or {}).get("loss")
    if kernel is not None:
        ce = kernel(logits, targets)
    else:
        labels = targets.flatten()
        ce = F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100, reduction="sum")  # anchor: loss
    return {"ce": ce, "z": 1e-3 * z}
