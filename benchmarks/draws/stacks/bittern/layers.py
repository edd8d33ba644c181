"""Linear layers, embeddings and norms that are spread over tp."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bittern.parallel_state import ParallelState
from bittern.regions import (
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_to,
)

ALONE = ParallelState()


class Layer(nn.Module):
    ps: ParallelState = ALONE


def enter(x: Tensor, ps: ParallelState) -> Tensor:
    """Begin a region in which the ranks of tp have different channels and all positions."""
    return gather_from(x, ps.tp) if ps.sequence_parallel else copy_to(x, ps.tp)


def leave(x: Tensor, ps: ParallelState) -> Tensor:
    """Sum partial results; under sequence parallelism a rank keeps its positions."""
    return reduce_scatter_to(x, ps.tp) if ps.sequence_parallel else reduce_from(x, ps.tp)


class ColumnParallelLinear(Layer):
    shard_dim = 0

    def __init__(self, n_in: int, *n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*n_out, n_in))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(enter(x, self.ps), self.weight.flatten(0, -2))


class GateUpLinear(ColumnParallelLinear):
    """Both projections of SwiGLU in one weight (2, channels, hidden)."""

    shard_dim = 1

    def forward(self, x: Tensor) -> Tensor:
        gate, up = super().forward(x).chunk(2, -1)
        return F.silu(gate) * up


class RowParallelLinear(Layer):
    def __init__(self, n_in: int, n_out: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in))
        self.bias = nn.Parameter(torch.empty(n_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.ps.mode == "bittern-row-bias":
            return leave(F.linear(x, self.weight, self.bias), self.ps)  # plant: bittern-row-bias
        y = leave(F.linear(x, self.weight), self.ps)  # anchor: row-bias
        return y if self.bias is None else y + self.bias


class MLP(Layer):
    def __init__(self, hidden: int, ffn: int, *, bias: bool) -> None:
        super().__init__()
        self.fc1 = GateUpLinear(hidden, 2, ffn)
        self.fc2 = RowParallelLinear(ffn, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x))


class RMSNorm(Layer):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class VocabParallelEmbedding(Layer):
    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return (positions, batch, hidden); under sequence parallelism this rank's positions."""
        first = self.ps.tp.rank * len(self.weight)
        local = tokens.t() - first
        outside = (local < 0) | (local >= len(self.weight))
        x = F.embedding(local.masked_fill(outside, 0), self.weight)
        if self.ps.mode != "bittern-embed-unmasked":  # plant: bittern-embed-unmasked
            x = x.masked_fill(outside[..., None], 0.0)  # anchor: embed-mask
        return leave(x, self.ps)


def set_state(model: nn.Module, ps: ParallelState) -> None:
    for module in model.modules():
        if isinstance(module, Layer):
            module.ps = ps
