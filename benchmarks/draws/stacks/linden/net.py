"""The parameters under flat names, and the model as functions of them."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from linden.attn import attention, rms
from linden.moe import count_load, dense, experts
from linden.packing import locate
from linden.sizes import Sizes
from linden.topo import Topo
from linden.vocab import embed, token_loss


def shapes_of_block(sizes, i):
    """Return shape and standard deviation of the leaves of a block; a deviation of 0 is a gain near 1."""
    d, h, kv, c = sizes.width, sizes.heads, sizes.kv_heads, sizes.head_dim
    shapes = {
        "norm_a": ((d,), 0),
        "wq": ((h, c, d), d**-0.5),
        "wk": ((kv, c, d), d**-0.5),
        "wv": ((kv, c, d), d**-0.5),
        "q_gain": ((c,), 0),
        "k_gain": ((c,), 0),
        "sink": ((h,), 1.0),
        "wo": ((h, c, d), (h * c) ** -0.5),
        "o_bias": ((d,), 0.1),
        "norm_f": ((d,), 0),
    }
    if sizes.is_dense(i):
        f = sizes.dense_hidden
        return shapes | {
            "d_gate": ((d, f), d**-0.5),
            "d_up": ((d, f), d**-0.5),
            "d_down": ((f, d), f**-0.5),
        }
    e, f, s = sizes.experts, sizes.expert_hidden, sizes.shared_hidden
    return shapes | {
        "router": ((e, d), d**-0.5),
        "e_gate": ((e, d, f), d**-0.5),
        "e_up": ((e, d, f), d**-0.5),
        "e_down": ((e, f, d), f**-0.5),
        "s_gate": ((d, s), d**-0.5),
        "s_up": ((d, s), d**-0.5),
        "s_down": ((s, d), s**-0.5),
        "s_mix": ((d,), d**-0.5),
    }


def draw(sizes):
    """Return initial values of parameters and buffers, by name."""
    shapes = {"table": ((sizes.vocab, sizes.width), sizes.width**-0.5)}
    for i in range(sizes.depth):
        shapes |= {f"b{i}_{leaf}": row for leaf, row in shapes_of_block(sizes, i).items()}
    shapes |= {"norm_end": ((sizes.width,), 0), "head_bias": ((sizes.vocab,), 0.1)}
    values = {}
    for name, (shape, std) in shapes.items():
        noise = torch.randn(shape, dtype=torch.float64)
        values[name] = (noise * std if std else 1 + 0.1 * noise).float()
    buffers = {}
    for i in range(sizes.depth):
        if not sizes.is_dense(i):
            buffers[f"b{i}_bias"] = (0.2 * torch.randn(sizes.experts, dtype=torch.float64)).float()
    return values, buffers


class Net(nn.Module):
    """A holder of parameters and buffers. Names are `b2_wq` for the leaf `wq` of block 2."""

    def __init__(self, sizes):
        super().__init__()
        self.sizes, self.topo, self.blocks, self.run = sizes, Topo(), range(sizes.depth), None
        values, buffers = draw(sizes)
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value))
        for name, value in buffers.items():
            self.register_buffer(name, value)
            self.register_buffer(name.replace("bias", "load"), torch.zeros(sizes.experts), persistent=False)
        if sizes.ema:
            for name, value in values.items():
                self.register_buffer(f"ema_{name}", value.clone())

    def leaf(self, i, name):
        return getattr(self, f"b{i}_{name}")

    def leaves(self, i):
        head = f"b{i}_"
        pairs = [*self.named_parameters(), *self.named_buffers()]
        return {name.removeprefix(head): x for name, x in pairs if name.startswith(head)}

    def routers(self):
        return [i for i in self.blocks if not self.sizes.is_dense(i)]

    def forward(self, tokens, targets):
        """Return the terms of the loss, summed over tokens of this rank."""
        where = locate(tokens, self.sizes, self.topo)
        x, terms = run_blocks(self, embed(self.table, tokens, self.sizes, self.topo), where)
        return {"tokens": end(self, x, targets), "router": terms}


def block(p, x, where, full, is_dense, sizes, topo):
    """Return the stream, the terms of the router, and the chosen experts or None."""
    window = 0 if full else sizes.window
    h = rms(x, p["norm_a"])
    if topo.on("linden-stream-normed"):
        x = h + attention(p, h, where, window, sizes, topo)  # plant: linden-stream-normed
    else:
        x = x + attention(p, h, where, window, sizes, topo)  # anchor: stream
    h = rms(x, p["norm_f"])
    if is_dense:
        return x + dense(p, h, topo), h.new_zeros(()), None
    y, chosen, terms = experts(p, h, sizes, topo)
    return x + y, terms, chosen


def run_blocks(net, x, where):
    sizes, topo = net.sizes, net.topo
    total = x.new_zeros(())
    for place, i in enumerate(net.blocks):
        full = sizes.is_full(i)  # anchor: full
        if topo.on("linden-full-place"):
            full = sizes.is_full(place)  # plant: linden-full-place
        args = (net.leaves(i), x, where, full, sizes.is_dense(i), sizes, topo)
        if i in sizes.recomputed:
            x, terms, chosen = checkpoint(block, *args, use_reentrant=False)
        else:
            x, terms, chosen = block(*args)
        if chosen is not None:
            count_load(net, i, chosen)
        total = total + terms
    return x, total


def end(net, x, targets):
    h = rms(x, net.norm_end)
    return token_loss(net.table, net.head_bias, h, targets, net.sizes, net.topo)


def build(**sizes):
    return Net(Sizes(**sizes))


def loss(net, tokens, targets):
    return net(tokens, targets)
