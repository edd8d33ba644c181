"""The table of the vocabulary, which is embedding and head, and the head for the token after next."""

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F

from juniper.attention import Norm
from juniper.collectives import gather, scatter
from juniper.grid import Grid, add_up


class _CappedLoss(Function):
    """Cross entropy of capped logits of which a rank has some columns. Targets below 0 do not count."""

    @staticmethod
    def forward(ctx, raw, targets, cap, grid):
        tp, rows, mode = grid.tp, raw.shape[-1], grid.mode
        logits = cap * torch.tanh(raw / cap)
        peak = logits.amax(-1)
        if tp.size > 1 and mode != "ju28":  # plant: ju28
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=tp.group)  # anchor: peak
        exps = (logits - peak[..., None]).exp()
        mass = add_up(exps.sum(-1), tp)
        place = targets - tp.rank * rows
        mine = (place >= 0) & (place < rows)  # anchor: mine
        if mode == "ju29":
            mine = (place >= 0) & (place <= rows)  # plant: ju29
        place = place.clamp(0, rows - 1)[..., None]
        hit = add_up(logits.gather(-1, place)[..., 0] * mine, tp)
        valid = targets >= 0
        ctx.save_for_backward(exps / mass[..., None], logits, place, mine, valid)
        ctx.cap, ctx.mode = cap, mode
        return (mass.log() + peak - hit) * valid

    @staticmethod
    def backward(ctx, grad):
        probs, logits, place, mine, valid = ctx.saved_tensors
        out = probs.scatter_add(-1, place, -mine[..., None].to(probs.dtype))
        if ctx.mode != "ju30":
            out = out * (1 - (logits / ctx.cap).square())  # anchor: cap-back
        else:
            out = out * (1 - logits / ctx.cap)  # plant: ju30
        if ctx.mode == "ju31":
            return out * grad[..., None], None, None, None  # plant: ju31
        return out * (grad * valid)[..., None], None, None, None  # anchor: valid-back


class Table(nn.Module):
    grid = Grid()
    cuts = {"rows": ("tp", 0)}
    partial = ()

    def __init__(self, c):
        super().__init__()
        self.c = c
        self.rows = nn.Parameter(torch.empty(c.vocab, c.width))

    def forward(self, tokens):
        grid, count = self.grid, self.rows.shape[0]
        place = tokens - grid.tp.rank * count
        outside = (place < 0) | (place >= count)
        x = F.embedding(place.clamp(0, count - 1), self.rows)
        if grid.mode != "ju32":  # plant: ju32
            x = x.masked_fill(outside[..., None], 0.0)  # anchor: outside-rows
        return scatter(x, grid.tp, grid.mode) * self.c.width**0.5

    def loss(self, x, targets, *, late=False):
        """Return the sum of the losses of tokens, for the normed stream."""
        grid, rows = self.grid, self.rows
        if grid.mode == "ju33" and late:
            rows = rows.detach()  # plant: ju33
        raw = F.linear(gather(x, grid.tp), rows)
        return _CappedLoss.apply(raw, targets, self.c.logit_cap, grid).sum()


class Ahead(nn.Module):
    """Predicts the token after next from the stream and the embedding of the next token."""

    grid = Grid()
    cuts = {}
    partial = ("proj",)

    def __init__(self, c, block):
        super().__init__()
        self.c = c
        self.norm_stream, self.norm_next, self.norm = Norm(c.width), Norm(c.width), Norm(c.width)
        self.proj = nn.Parameter(torch.empty(c.width, 2 * c.width))
        self.block = block

    def forward(self, x, tokens, targets, later, seq, table):
        """Return the loss, the chosen experts and the balance term of the block."""
        mode = self.grid.mode
        known = targets.clamp(min=0)  # anchor: known
        if mode == "ju34":
            known = tokens  # plant: ju34
        if mode == "ju35":
            x = x.detach()  # plant: ju35
        joined = torch.cat([self.norm_stream(x), self.norm_next(table(known))], -1)
        h, chosen, balance = self.block(F.linear(joined, self.proj), seq)
        # After the end of a document the next token but one is of another one.
        later = later.masked_fill(targets < self.c.enders, -100)
        return table.loss(self.norm(h), later, late=True), chosen, balance
