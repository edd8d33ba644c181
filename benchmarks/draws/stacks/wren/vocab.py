"""Embedding and head, whose rows are spread over `tp`."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from wren.comm import collect, spread, total
from wren.world import World, own_part, raw_sum


def find(tokens, rows, w):
    """Return row numbers of tokens in this rank's slice of the vocabulary, and which of them are in it."""
    index = tokens - w.tp.rank * rows
    return index.clamp(0, rows - 1), (index >= 0) & (index < rows)


class Embedding(nn.Module):
    world = World()

    def __init__(self, c):
        super().__init__()
        self.c = c
        self.weight = nn.Parameter(torch.empty(c.vocab, c.width))

    def forward(self, tokens):
        """Return this rank's part of the stream."""
        w, rows = self.world, len(self.weight)
        index, mine = find(tokens.t(), rows, w)  # anchor: mine
        if w.has("wren-embed-edge"):
            mine = mine | (tokens.t() == (w.tp.rank + 1) * rows)  # plant: wren-embed-edge
        x = F.embedding(index, self.weight) * mine[..., None]
        if w.has("wren-embed-slice"):
            return own_part(x, w.tp) * self.c.width**0.5  # plant: wren-embed-slice
        return spread(x, w.tp, w) * self.c.width**0.5  # anchor: embed-spread


class Head(nn.Module):
    world = World()

    def __init__(self, c):
        super().__init__()
        self.c = c
        self.norm = nn.Parameter(torch.empty(c.width))
        self.weight = nn.Parameter(torch.empty(c.vocab, c.width))

    def forward(self, x, targets):
        """Return the cross entropy and the term of the log-sum-exp, summed over tokens that count."""
        w, targets = self.world, targets.t()
        x = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.norm
        logits = F.linear(collect(x, w.tp), self.weight)
        peak = logits.detach().amax(-1)
        if not w.has("wren-peak-own"):  # plant: wren-peak-own
            peak = raw_sum(peak, w.tp, dist.ReduceOp.MAX)  # anchor: peak
        mass = (logits - peak[..., None]).exp().sum(-1)
        whole = total(mass, w.tp, shared=True).log() + peak
        index, mine = find(targets, len(self.weight), w)
        hit = logits.gather(-1, index[..., None])[..., 0]
        if not w.has("wren-hit-unmasked"):  # plant: wren-hit-unmasked
            hit = hit * mine  # anchor: hit-mask
        hit = total(hit, w.tp, shared=True)
        counted = targets >= 0
        z = whole.square()  # anchor: logit-z
        if w.has("wren-z-slice"):
            z = logits.logsumexp(-1).square()  # plant: wren-z-slice
        nll, z = ((whole - hit) * counted).sum(), (z * counted).sum()
        return {"next": nll, "logit_z": self.c.logit_z * z}
