"""A GPT that does not use moeverify, parallelized by its author with torch alone."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F


class SelfAttention(nn.Module):
    """Causal attention with per-head normalization of queries and keys."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_width = width // num_heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.query_norm = nn.RMSNorm(self.head_width)
        self.key_norm = nn.RMSNorm(self.head_width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.split(project(x)) for project in (self.query, self.key, self.value))
        q, k = self.query_norm(q), self.key_norm(k)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """Reshape (rows, tokens, heads * head_width) to (rows, tokens, heads, head_width)."""
        return x.unflatten(-1, (-1, self.head_width))


class Layer(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = SelfAttention(width, num_heads)
        self.ln_2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.shrink = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.shrink(F.gelu(self.expand(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, vocab: int, width: int, num_layers: int, num_heads: int, context: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(context, width)
        self.register_buffer("places", torch.arange(context))
        self.h = nn.ModuleList(Layer(width, num_heads) for _ in range(num_layers))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(self.places[: tokens.shape[1]])
        for layer in self.h:
            x = layer(x)
        return self.head(self.ln_f(x))


def make(vocab: int = 96, width: int = 32, num_layers: int = 2, num_heads: int = 4, context: int = 16) -> GPT:
    """Return the model with initial values drawn in float64: those of float32 depend on the processor."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return GPT(vocab, width, num_layers, num_heads, context).float()
    finally:
        torch.set_default_dtype(before)


def parallelize(model: GPT, mesh: DeviceMesh) -> GPT:
    """Apply tensor parallelism over `tp`, then FSDP2 over `dp_shard` (HSDP with `dp_replicate`)."""
    if mesh["tp"].size() > 1:
        apply_tensor_parallel(model, mesh["tp"])
    apply_fsdp(model, mesh)
    return model


def apply_tensor_parallel(model: GPT, tp: DeviceMesh) -> None:
    for layer in model.h:
        plan = {
            "attn.query": ColwiseParallel(),
            "attn.key": ColwiseParallel(),
            "attn.value": ColwiseParallel(),
            # Each rank has some of the heads, so these gradients are sums over tp.
            "attn.query_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
            "attn.key_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
            "attn.out": RowwiseParallel(),
            "expand": ColwiseParallel(),
            "shrink": RowwiseParallel(),
        }
        parallelize_module(layer, tp, plan)
    parallelize_module(model.wte, tp, RowwiseParallel(input_layouts=Replicate()))
    parallelize_module(model.head, tp, ColwiseParallel(output_layouts=Shard(-1), use_local_output=False))


def apply_fsdp(model: GPT, mesh: DeviceMesh) -> None:
    if mesh["dp_replicate"].size() > 1:
        data = mesh["dp_replicate", "dp_shard"]
    elif mesh["dp_shard"].size() > 1:
        data = mesh["dp_shard"]
    else:
        return
    for layer in model.h:
        fully_shard(layer, mesh=data)
    fully_shard(model, mesh=data)
