"""A selective state-space layer: a decaying state of each head, which each document begins anew."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bittern.config import Config
from bittern.context import stack_states, with_halo
from bittern.layers import ColumnParallelLinear, Layer, RowParallelLinear
from bittern.packing import Packed
from bittern.regions import reduce_from, sum_each


class Mixer(Layer):
    """`in_proj` has for each head queries, keys, values, gates and one rate."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        heads, dim = config.ssm_heads, config.ssm_dim
        self.config, self.dim = config, dim
        self.in_proj = ColumnParallelLinear(config.hidden, heads * (4 * dim + 1))
        self.conv = nn.Parameter(torch.empty(heads, 3 * dim, config.conv_width))
        self.rate_bias = nn.Parameter(torch.empty(heads))
        self.log_decay = nn.Parameter(torch.empty(heads))
        self.skip = nn.Parameter(torch.empty(heads))
        self.gain = nn.Parameter(torch.empty(heads, dim))
        self.out_proj = RowParallelLinear(heads * dim, config.hidden, bias=False)

    def forward(self, x: Tensor, packed: Packed, table: object) -> Tensor:
        mixed = self.in_proj(x).unflatten(-1, (-1, 4 * self.dim + 1))
        qkv, gate, rate = mixed.split([3 * self.dim, self.dim, 1], -1)
        q, k, v = F.silu(self.convolve(qkv, packed)).chunk(3, -1)
        decay, weight = self.rates(rate.squeeze(-1))
        y = self.scan(q, k * weight[..., None], v, decay, packed)
        y = (y + v * self.skip[:, None]) * F.silu(gate)
        return self.out_proj(self.norm(y).flatten(2))

    def convolve(self, x: Tensor, packed: Packed) -> Tensor:
        """Apply the causal convolution of each channel within documents."""
        width, n_own = self.config.conv_width, len(x)
        if self.ps.mode == "bittern-conv-edge":
            reach = x  # plant: bittern-conv-edge
        else:
            reach = with_halo(x, width - 1, self.ps.cp)  # anchor: conv-halo
        reach = F.pad(reach, (0, 0, 0, 0, 0, 0, n_own + width - 1 - len(reach), 0))
        own, y = packed.own, torch.zeros_like(x)
        docs = packed.docs_at(own)
        for back in range(width):
            same = packed.docs_at((own - back).clamp(min=0)) == docs
            tap = reach[width - 1 - back : width - 1 - back + n_own]
            y = y + tap * same.t()[..., None, None] * self.conv[..., back]
        return y

    def rates(self, rate: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logarithm of the decay of each position and head, and the weight of its input."""
        n_local = rate.shape[-1]
        index = self.ps.tp.rank * n_local + torch.arange(n_local)  # anchor: head-index
        if self.ps.mode == "bittern-head-index":
            index = torch.arange(n_local)  # plant: bittern-head-index
        step = F.softplus(rate + self.rate_bias) / (1 + index)
        return -step * self.log_decay.exp(), step

    def scan(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, packed: Packed) -> Tensor:
        total = decay.cumsum(0)
        docs = packed.docs_at(packed.own).t()
        causal = torch.ones(len(q), len(q), dtype=torch.bool).tril()[..., None]
        same = ((docs[:, None] == docs) & causal)[..., None]
        factors = (total[:, None] - total).masked_fill(~same, float("-inf")).exp()
        y = torch.einsum("tbhd,sbhd,tsbh,sbhe->tbhe", q, k, factors, v)
        state = self.carry(k, v, total, docs, packed)
        into = total.exp()  # anchor: carry-doc
        if self.ps.mode != "bittern-carry-doc":  # plant: bittern-carry-doc
            before = packed.docs[:, max(packed.offset - 1, 0)]
            into = into * (docs == before)[..., None]  # anchor: carry-doc
        return y + torch.einsum("tbhd,bhde,tbh->tbhe", q, state, into)

    def carry(self, k: Tensor, v: Tensor, total: Tensor, docs: Tensor, packed: Packed) -> Tensor:
        """Return the state at the end of the previous rank, from what every rank adds and how it decays."""
        cp = self.ps.cp
        last = (docs == docs[-1])[..., None]
        left = (total[-1] - total).masked_fill(~last, float("-inf")).exp()
        added = stack_states(torch.einsum("sbh,sbhd,sbhe->bhde", left, k, v), cp)
        before = packed.docs[:, max(packed.offset - 1, 0)]
        kept = stack_states(total[-1].exp() * (docs[-1] == before)[:, None], cp)
        # Every rank takes part in the backward passes of both gathers, also one that needs no state.
        state = 0.0 * (added.sum(0) + kept.sum(0)[..., None, None])
        for rank in range(cp.rank):
            if self.ps.mode == "bittern-state-decay":
                state = (state + added[rank]) * kept[rank][..., None, None]  # plant: bittern-state-decay
            else:
                state = state * kept[rank][..., None, None] + added[rank]  # anchor: state-decay
        return state

    def norm(self, y: Tensor) -> Tensor:
        """Normalize all heads of a position together, also those of other ranks."""
        squares = y.square().sum((2, 3), keepdim=True)
        width = self.config.ssm_heads * self.dim
        if self.ps.mode == "bittern-group-norm":
            mean = squares / (y.shape[2] * y.shape[3])  # plant: bittern-group-norm
        elif self.ps.mode == "bittern-group-norm-grad":
            mean = reduce_from(squares, self.ps.tp) / width  # plant: bittern-group-norm-grad
        else:
            mean = sum_each(squares, self.ps.tp) / width  # anchor: group-norm
        return y * (mean + self.config.eps).rsqrt() * self.gain
