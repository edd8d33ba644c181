"""Causal attention within samples. Keys and values travel around the ranks of cp."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from marten.comms import enter, hand_on, leave
from marten.fleet import Piece
from marten.layers import Projection
from marten.packing import Batch
from marten.settings import Settings


def turn(x: Tensor, places: Tensor) -> Tensor:
    """Rotate (rows, positions, heads, width) by the places in a sample."""
    half = x.shape[-1] // 2
    rates = 50.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    angles = places[..., None, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(Piece):
    """Every head has a sink: a logit without a value."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width, head = settings.width, settings.head_width
        self.settings, self.repeats = settings, settings.q_heads // settings.kv_heads
        self.q = Projection(width, settings.q_heads * head, settings)
        self.k = Projection(width, settings.kv_heads * head, settings)
        self.v = Projection(width, settings.kv_heads * head, settings)
        self.out = Projection(settings.q_heads * head, width, settings)
        self.out_bias = nn.Parameter(torch.empty(width))
        self.sink = nn.Parameter(torch.empty(settings.q_heads))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        head = self.settings.head_width
        x = enter(x, self.fleet).unflatten(0, batch.tokens.shape)
        q, k, v = (part(x).unflatten(-1, (-1, head)) for part in (self.q, self.k, self.v))
        q, k = turn(q, batch.places), turn(k, batch.places)
        y = self.attend(q, k.repeat_interleave(self.repeats, 2), v.repeat_interleave(self.repeats, 2), batch)
        return leave(self.out(y.flatten(0, 1)), self.fleet) + self.out_bias

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Return (rows, positions, channels). Sums of exponentials over the blocks of keys so far are kept."""
        cp, n_own = self.fleet.cp, q.shape[1]
        most = self.sink[None, :, None].detach().expand(len(q), -1, n_own)
        over, under = 0.0, (self.sink[None, :, None] - most).exp()
        for turn_number in range(cp.size):
            source = (cp.rank - turn_number) % cp.size
            scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * self.settings.head_width**-0.5
            scores = scores.masked_fill(~self.seen(batch, source * n_own)[:, None], float("-inf"))
            highest = torch.maximum(most, scores.detach().amax(-1))
            weights, fade = (scores - highest[..., None]).exp(), (most - highest).exp()
            under = under * fade + weights.sum(-1)
            more = torch.einsum("bhqk,bkhd->bhqd", weights, v)
            if self.fleet.flagged("marten-ring-fade"):
                over = over + more  # plant: marten-ring-fade
            else:
                over = over * fade[..., None] + more  # anchor: ring-fade
            most = highest
            if turn_number + 1 < cp.size:
                k, v = hand_on(torch.cat([k, v], -1), self.fleet).chunk(2, -1)
        return (over / under[..., None]).transpose(1, 2).flatten(2)

    def seen(self, batch: Batch, first: int) -> Tensor:
        """Return which of the keys from a place on each query sees (rows, queries, keys)."""
        queries = batch.start + torch.arange(batch.tokens.shape[1])
        keys = first + torch.arange(batch.tokens.shape[1])
        same = batch.whole[:, queries, None] == batch.whole[:, None, keys]
        return same & (queries[:, None] >= keys)
