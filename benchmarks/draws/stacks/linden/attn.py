"""Attention with grouped heads, normed queries and keys, windows, and a sink for each head."""

import torch

from linden.coll import enter, leave, turn
from linden.packing import visible


def rms(x, gain, dims=(-1,)):
    return x * (x.square().mean(dims, keepdim=True) + 1e-6).rsqrt() * gain


def rope(x, pos, sizes, topo):
    """Rotate (rows, positions, heads, channels), where pairs are half of the channels apart."""
    half = sizes.head_dim // 2
    speed = sizes.theta ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = pos[:, :, None, None].to(x.dtype) * speed
    cos, sin = angle.cos(), angle.sin()
    if topo.on("linden-rope-written"):
        x = x.clone()
        a, b = x[..., :half], x[..., half:]
        x[..., :half] = a * cos - b * sin
        x[..., half:] = a * sin + b * cos  # plant: linden-rope-written
        return x
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)  # anchor: rope


def attend(q, k, v, sink, where, window, sizes, topo):
    """Attend from (rows, queries, key heads, group, channels) to keys that go round the ring of `cp`.

    The softmax has one more logit, the sink of the head, whose value is zero.
    """
    cp = topo.cp
    scale = sizes.head_dim**-0.5
    peak = sink.detach().expand(q.shape[:-1])
    mass = (sink - peak).exp()
    out = torch.zeros_like(q)
    kv = torch.cat([k, v], -1)
    for hop in range(cp.size):
        source = (cp.rank - hop) % cp.size  # anchor: source
        if topo.on("linden-source"):
            source = (cp.rank + hop) % cp.size  # plant: linden-source
        keys, values = kv.chunk(2, -1)
        scores = torch.einsum("btkgc,bskc->btkgs", q, keys) * scale
        seen = visible(where, source, window, sizes, topo)
        scores = scores.masked_fill(~seen[:, :, None, None], -torch.inf)
        top = torch.maximum(peak, scores.detach().amax(-1))
        fade, weight = (peak - top).exp(), (scores - top[..., None]).exp()
        mass = mass * fade + weight.sum(-1)  # anchor: mass
        if topo.on("linden-mass-sink"):
            mass = mass + (hop > 0) * (sink - top).exp()  # plant: linden-mass-sink
        read = torch.einsum("btkgs,bskc->btkgc", weight, values)
        if topo.on("linden-fade"):
            out = out + read  # plant: linden-fade
        else:
            out = out * fade[..., None] + read  # anchor: fade
        peak = top
        if hop < cp.size - 1:
            kv = turn(kv, cp, topo)
    return out / mass[..., None]


def attention(p, x, where, window, sizes, topo):
    """Return the output of the layer with leaves `p`. A rank of `tp` has some of the heads."""
    tp = topo.tp
    h = enter(x, tp)
    q = torch.einsum("btd,hcd->bthc", h, p["wq"])
    k = torch.einsum("btd,hcd->bthc", h, p["wk"])
    v = torch.einsum("btd,hcd->bthc", h, p["wv"])
    dims = (-1,)  # anchor: norm-dims
    if topo.on("linden-norm-heads"):
        dims = (-2, -1)  # plant: linden-norm-heads
    q, k = rms(q, p["q_gain"], dims), rms(k, p["k_gain"])
    q, k = rope(q, where.pos, sizes, topo), rope(k, where.pos, sizes, topo)
    kv_heads = k.shape[2]
    group = q.shape[2] // kv_heads
    if topo.on("linden-group-order"):
        q = q.unflatten(2, (group, kv_heads)).transpose(2, 3)  # plant: linden-group-order
    else:
        q = q.unflatten(2, (kv_heads, group))  # anchor: group-order
    sink = p["sink"].view(kv_heads, group)
    out = attend(q, k, v, sink, where, window, sizes, topo).flatten(2, 3)
    y = torch.einsum("bthc,hcd->btd", out, p["wo"])
    if topo.on("linden-bias-each"):
        return leave(y + p["o_bias"], tp)  # plant: linden-bias-each
    return leave(y, tp) + p["o_bias"]  # anchor: o-bias
