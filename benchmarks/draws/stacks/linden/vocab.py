"""Embedding and cross entropy over a vocabulary whose rows are spread over `tp`."""

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.nn import functional as F

from linden.coll import enter, leave
from linden.topo import all_sum


def first_row(table, topo):
    return topo.tp.rank * table.shape[0]


def embed(table, tokens, sizes, topo):
    rows = table.shape[0]
    index = tokens - first_row(table, topo)
    mine = (index >= 0) & (index < rows)
    x = F.embedding(index.clamp(0, rows - 1), table) * mine[..., None]
    return leave(x, topo.tp) * sizes.width**0.5


class _TokenLoss(Function):
    """Cross entropy of each token with a term of the squared log-sum-exp, over a slice of the logits."""

    @staticmethod
    def forward(ctx, logits, targets, first, z_coef, topo):
        tp = topo.tp
        peak = logits.amax(-1)
        if tp.size > 1:
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=tp.pg)
        exps = (logits - peak[..., None]).exp()
        total = all_sum(exps.sum(-1), tp)
        lse = total.log() + peak
        index = targets - first
        mine = (index >= 0) & (index < logits.shape[-1])
        index = index.clamp(0, logits.shape[-1] - 1)[..., None]
        hit = logits.gather(-1, index)[..., 0] * mine
        if tp.size > 1 and topo.on("linden-hit-max"):
            dist.all_reduce(hit, dist.ReduceOp.MAX, group=tp.pg)  # plant: linden-hit-max
        else:
            hit = all_sum(hit, tp)  # anchor: hit
        ctx.save_for_backward(exps / total[..., None], index, mine, lse)
        ctx.z_coef, ctx.topo = z_coef, topo
        return lse - hit + z_coef * lse.square()

    @staticmethod
    def backward(ctx, grad):
        probs, index, mine, lse = ctx.saved_tensors
        pull = 1 + 2 * ctx.z_coef * lse  # anchor: pull
        if ctx.topo.on("linden-z-half"):
            pull = 1 + ctx.z_coef * lse  # plant: linden-z-half
        out = probs * pull[..., None]
        out.scatter_add_(-1, index, -mine[..., None].to(out.dtype))
        return out * grad[..., None], None, None, None, None


def token_loss(table, bias, h, targets, sizes, topo):
    """Return the sum over tokens that count, where the head is the table."""
    first = first_row(table, topo)
    logits = torch.einsum("btd,vd->btv", enter(h, topo.tp), table)
    own = bias[first : first + len(table)]  # anchor: own-bias
    if topo.on("linden-bias-first"):
        own = bias[: len(table)]  # plant: linden-bias-first
    loss = _TokenLoss.apply(logits + own, targets, first, sizes.z_coef, topo)
    return (loss * (targets >= 0)).sum()
