"""Feed-forward layers. Experts are spread over `ep`, and their hidden units over `tp`."""

import torch
from torch import nn
from torch.nn import functional as F

from wren.attention import rms
from wren.comm import collect, exchange, replicate, spread, total
from wren.world import World, own_part, raw_gather, raw_sum, swap_counts


def glu(x, up, down):
    """Apply weights of shapes (2, hidden, width) and (hidden, width)."""
    gate, value = F.linear(x, up[0]), F.linear(x, up[1])
    return (F.silu(gate) * value) @ down


class Mlp(nn.Module):
    """A dense layer, also used as the shared expert. Returns partial sums over `tp`."""

    world = World()

    def __init__(self, width, hidden):
        super().__init__()
        self.up = nn.Parameter(torch.empty(2, hidden, width))
        self.down = nn.Parameter(torch.empty(hidden, width))

    def forward(self, h):
        return glu(h, self.up, self.down)


class Router(nn.Module):
    """Chooses experts by sigmoid scores, a bias that balances them, and noise that breaks habits."""

    world = World()

    def __init__(self, c, layer):
        super().__init__()
        self.c, self.layer = c, layer
        self.weight = nn.Parameter(torch.empty(c.experts, c.width))
        self.register_buffer("bias", torch.zeros(c.experts))
        self.register_buffer("load", torch.zeros(c.experts), persistent=False)

    def noise(self, plan, dtype):
        """Return (tokens of this rank's part, 1, experts) noise, which depends on the place in the row."""
        c, w = self.c, self.world
        seed = c.jitter_seed + self.layer  # anchor: noise-seed
        if w.has("wren-noise-seed"):
            seed = c.jitter_seed + self.layer + 100 * w.dp.rank  # plant: wren-noise-seed
        generator = torch.Generator().manual_seed(seed)
        table = torch.randn(plan.length, c.experts, generator=generator, dtype=torch.float64)
        place = own_part(plan.place, w.tp)  # anchor: noise-place
        if w.has("wren-noise-place"):
            place = torch.arange(len(place))  # plant: wren-noise-place
        return c.jitter * table[place, None].to(dtype)

    def forward(self, x, plan):
        """Return chosen experts, gates and terms of the loss, of this rank's part of the stream."""
        c = self.c
        logits = F.linear(x, self.weight)
        scores = logits.sigmoid()
        chosen = (scores.detach() + self.bias + self.noise(plan, x.dtype)).topk(c.top_k, -1).indices
        gates = scores.gather(-1, chosen)
        gates = c.route_scale * gates / gates.sum(-1, keepdim=True)
        with torch.no_grad():
            self.load += torch.bincount(chosen.flatten(), minlength=c.experts)
        return chosen, gates, self.terms(logits, scores, chosen, plan)

    def terms(self, logits, scores, chosen, plan):
        c, w = self.c, self.world
        counts = F.one_hot(chosen, c.experts).sum((0, 2)).to(scores.dtype)
        counts = raw_sum(raw_sum(counts, w.tp), w.cp)
        length = plan.length  # anchor: balance-length
        if w.has("wren-balance-length"):
            length = len(scores)  # plant: wren-balance-length
        share = (scores / scores.sum(-1, keepdim=True)).sum(0)
        balance = c.balance * c.experts / (c.top_k * length) * (counts * share).sum()
        z = c.router_z * logits.logsumexp(-1).square().sum()
        return {"balance": balance, "router_z": z}


class Experts(nn.Module):
    world = World()

    def __init__(self, c):
        super().__init__()
        self.c = c
        self.up = nn.Parameter(torch.empty(c.experts, 2, c.expert_ff, c.width))
        self.down = nn.Parameter(torch.empty(c.experts, c.expert_ff, c.width))

    def compute(self, rows, local):
        """Apply to each row the expert of this rank with its number."""
        order = local.argsort(stable=True)
        counts = torch.bincount(local, minlength=len(self.up)).tolist()
        parts = [glu(part, self.up[e], self.down[e]) for e, part in enumerate(rows[order].split(counts))]
        done = torch.cat(parts)
        if self.world.has("wren-back-unsorted"):
            return done[order]  # plant: wren-back-unsorted
        return done[order.argsort()]  # anchor: unsorted

    def forward(self, h, chosen, gates):
        """Return the gated sum of the outputs for (tokens, width) rows: partial sums over `tp`."""
        c, w, ep = self.c, self.world, self.world.ep
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        each = c.experts // ep.size
        per_rank = torch.bincount(flat, minlength=c.experts).view(ep.size, each).sum(1)  # anchor: per-rank
        if w.has("wren-split-strided"):
            counts = torch.bincount(flat, minlength=c.experts)
            per_rank = counts.view(each, ep.size).sum(0)  # plant: wren-split-strided
        out, into = per_rank.tolist(), swap_counts(per_rank, ep).tolist()
        rows = exchange(h[order // c.top_k], out, into, ep, w)
        numbers = exchange(flat[order], out, into, ep, w)
        local = numbers % each  # anchor: local
        if w.has("wren-expert-offset"):
            local = numbers // ep.size  # plant: wren-expert-offset
        back = exchange(self.compute(rows, local), into, out, ep, w)
        done = back[order.argsort()].unflatten(0, (-1, c.top_k))
        return (done * gates[..., None]).sum(1)


class Sparse(nn.Module):
    """Routed experts beside a shared one."""

    world = World()

    def __init__(self, c, layer):
        super().__init__()
        self.norm = nn.Parameter(torch.empty(c.width))
        self.router = Router(c, layer)
        self.experts = Experts(c)
        self.shared = Mlp(c.width, c.shared_ff)

    def forward(self, x, plan):
        w = self.world
        x = rms(x, self.norm)
        chosen, gates, terms = self.router(x, plan)
        h = collect(x, w.tp)
        if w.has("wren-gates-replicated"):
            gates = replicate(gates, w.tp)  # plant: wren-gates-replicated
        else:
            gates = collect(gates, w.tp)  # anchor: gates-collected
        chosen = raw_gather(chosen, w.tp)  # anchor: chosen-gathered
        if w.has("wren-chosen-turned"):
            chosen = chosen.roll(-w.tp.rank * len(x), 0)  # plant: wren-chosen-turned
        y = self.experts(h.flatten(0, 1), chosen.flatten(0, 1), gates.flatten(0, 1)).view_as(h)
        shared = self.shared(h)
        if w.has("wren-shared-scaled"):
            shared = shared / w.tp.size  # plant: wren-shared-scaled
        y = spread(y + shared, w.tp, w)
        return y, {name: total(x, w.tp, shared=True) for name, x in terms.items()}


class Dense(nn.Module):
    world = World()

    def __init__(self, c):
        super().__init__()
        self.norm = nn.Parameter(torch.empty(c.width))
        self.mlp = Mlp(c.width, c.dense_ff)

    def forward(self, x, plan):
        w = self.world
        h = collect(rms(x, self.norm), w.tp)
        return spread(self.mlp(h), w.tp, w), {}


@torch.no_grad()
def move_biases(model):
    """Move the biases of routers against the loads of the global batch."""
    w = model.world
    for router in model.routers():
        load = raw_sum(router.load, w.tok)  # anchor: load
        if w.has("wren-load-rows"):
            load = raw_sum(router.load, w.dp)  # plant: wren-load-rows
        load = raw_sum(load, w.tp)
        router.bias += router.c.bias_rate * (load.mean() - load).sign()
        router.load.zero_()
