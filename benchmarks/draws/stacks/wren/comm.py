"""Collectives with gradients. The stream is (positions, rows, width), so parts of a row are joined on dim 0."""

import torch.distributed as dist
from torch.autograd import Function

from wren.world import own_part, raw_gather, raw_scatter, raw_sum


class Collect(Function):
    """All parts of a row. Ranks then compute different things, so gradients are summed."""

    @staticmethod
    def forward(ctx, x, team):
        ctx.team = team
        return raw_gather(x, team)

    @staticmethod
    def backward(ctx, grad):
        return raw_scatter(grad, ctx.team), None


class Replicate(Function):
    """All parts of a row. Ranks then compute the same, so a gradient is complete on each."""

    @staticmethod
    def forward(ctx, x, team):
        ctx.team = team
        return raw_gather(x, team)

    @staticmethod
    def backward(ctx, grad):
        return own_part(grad, ctx.team).clone(), None


class Spread(Function):
    """This rank's part of the sum of partial results."""

    @staticmethod
    def forward(ctx, x, team, w):
        ctx.args = team, w
        return raw_scatter(x, team)

    @staticmethod
    def backward(ctx, grad):
        team, w = ctx.args
        if w.has("wren-spread-back"):
            grad = grad / team.size  # plant: wren-spread-back
        return raw_gather(grad, team), None, None  # anchor: spread-back


class Total(Function):
    """A sum over ranks. With `shared` all ranks go on alike; otherwise each uses it for its own part."""

    @staticmethod
    def forward(ctx, x, team, shared):
        ctx.team, ctx.shared = team, shared
        return raw_sum(x, team)

    @staticmethod
    def backward(ctx, grad):
        return (grad.clone() if ctx.shared else raw_sum(grad, ctx.team)), None, None


class Exchange(Function):
    """All-to-all of rows, given how many go to each rank and how many come from each."""

    @staticmethod
    def forward(ctx, x, out, into, team, w):
        ctx.args = out, into, team, w
        return swap(x, out, into, team, w)

    @staticmethod
    def backward(ctx, grad):
        out, into, team, w = ctx.args
        return swap(grad, into, out, team, w), None, None, None, None


def swap(x, out, into, team, w):
    if team.size == 1:
        return x.clone()
    if w.has("wren-wire-half") and x.is_floating_point():
        x = x.bfloat16().to(x.dtype)  # plant: wren-wire-half
    y = x.new_empty(sum(into), *x.shape[1:])
    dist.all_to_all_single(y, x.contiguous(), into, out, group=team.handle)
    return y


def collect(x, team):
    return Collect.apply(x, team)


def replicate(x, team):
    return Replicate.apply(x, team)


def spread(x, team, w):
    return Spread.apply(x, team, w)


def total(x, team, *, shared):
    return Total.apply(x, team, shared)


def exchange(x, out, into, team, w):
    return Exchange.apply(x, out, into, team, w)
