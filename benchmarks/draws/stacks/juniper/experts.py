"""Feed-forward layers. Routed experts are spread over `ep`, which has the ranks of `dp_shard` and `tp`: each
of these has other tokens, since the stream is cut by positions over `tp`."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from juniper.collectives import exchange, gather, scatter
from juniper.grid import Grid, add_up


class Mlp(nn.Module):
    grid = Grid()
    cuts = {"gate": ("tp", 0), "up": ("tp", 0), "down": ("tp", 1)}
    partial = ()

    def __init__(self, width, hidden, *, shared=False):
        super().__init__()
        self.shared = shared
        self.gate = nn.Parameter(torch.empty(hidden, width))
        self.up = nn.Parameter(torch.empty(hidden, width))
        self.down = nn.Parameter(torch.empty(width, hidden))

    def forward(self, x):
        grid, reduces = self.grid, True
        if grid.mode == "ju16" and self.shared:
            reduces = False  # plant: ju16
        x = gather(x, grid.tp, reduces=reduces)
        y = F.gelu(F.linear(x, self.gate)) * F.linear(x, self.up)
        return scatter(F.linear(y, self.down), grid.tp, grid.mode)


class Router(nn.Module):
    """Chooses experts from the best groups, by scores with a bias that balances them."""

    grid = Grid()
    cuts = {}
    partial = ("weight",)

    def __init__(self, c):
        super().__init__()
        self.c = c
        self.weight = nn.Parameter(torch.empty(c.experts, c.width))
        self.register_buffer("bias", torch.zeros(c.experts))
        self.register_buffer("load", torch.zeros(c.experts), persistent=False)

    def choose(self, scores):
        c, mode = self.c, self.grid.mode
        biased = (scores + self.bias).detach()
        grouped = biased.unflatten(-1, (c.groups, -1))
        rank = grouped.topk(2, -1).values.sum(-1)  # anchor: group-rank
        if mode == "ju17":
            rank = grouped.amax(-1)  # plant: ju17
        kept = torch.zeros_like(rank).scatter(-1, rank.topk(c.top_groups, -1).indices, 1.0).bool()
        allowed = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
        return allowed.topk(c.top_k, -1).indices

    def forward(self, x):
        """Return chosen experts, their gates, and the balance term of (rows, positions, width)."""
        c, mode = self.c, self.grid.mode
        scores = F.linear(x, self.weight).sigmoid()  # anchor: scores
        if mode == "ju83":
            scores = F.linear(x.float(), self.weight.float()).sigmoid().to(x.dtype)  # plant: ju83
        chosen = self.choose(scores)
        gates = scores.gather(-1, chosen)
        return chosen, c.route_scale * gates / gates.sum(-1, keepdim=True), self.balance(scores, chosen)

    def balance(self, scores, chosen):
        """Return the sum over rows of share of choices times mean score, of this rank's positions."""
        c, grid = self.c, self.grid
        counts = F.one_hot(chosen, c.experts).sum((1, 2)).to(scores.dtype)
        parts = grid.row  # anchor: row-parts
        if grid.mode == "ju21":
            parts = grid.cp  # plant: ju21
        counts = add_up(counts, parts)
        share = (scores / scores.sum(-1, keepdim=True)).sum(1)
        length = scores.shape[1] * grid.row.size
        return c.balance * c.experts / (c.top_k * length) * (counts * share).sum()


class Experts(nn.Module):
    grid = Grid()
    cuts = {"gate": ("ep", 0), "up": ("ep", 0), "down": ("ep", 0)}
    partial = ()

    def __init__(self, c):
        super().__init__()
        self.c = c
        e, f, d = c.experts, c.expert_hidden, c.width
        self.gate, self.up = nn.Parameter(torch.empty(e, f, d)), nn.Parameter(torch.empty(e, f, d))
        self.down = nn.Parameter(torch.empty(e, d, f))

    def compute(self, rows, counts):
        """Apply the experts of this rank to rows that are sorted by expert."""
        done = []
        for e, part in enumerate(rows.split(counts)):
            hidden = F.gelu(F.linear(part, self.gate[e])) * F.linear(part, self.up[e])
            done.append(F.linear(hidden, self.down[e]))
        return torch.cat(done)

    def at_owners(self, rows, counts):
        """Send rows that are sorted by expert to the ranks of the experts, and return their outputs."""
        ep = self.grid.ep
        sent = counts.view(ep.size, -1)
        came = sent.clone()
        if ep.size > 1:
            dist.all_to_all_single(came, sent.contiguous(), group=ep.group)
        to, origin = sent.sum(1).tolist(), came.sum(1).tolist()
        rows = exchange(rows, to, origin, ep)
        blocks, local = rows.split(came.flatten().tolist()), came.shape[1]
        by_expert = [r * local + e for e in range(local) for r in range(ep.size)]
        rows = torch.cat([blocks[i] for i in by_expert])
        out = self.compute(rows, came.sum(0).tolist())
        sizes = came.t().flatten().tolist()  # anchor: back-sizes
        if self.grid.mode == "ju22":
            sizes = came.flatten().tolist()  # plant: ju22
        blocks = out.split(sizes)
        by_rank = [e * ep.size + r for r in range(ep.size) for e in range(local)]
        return exchange(torch.cat([blocks[i] for i in by_rank]), origin, to, ep)

    def forward(self, x, chosen, gates):
        c, mode = self.c, self.grid.mode
        flat, chosen, gates = x.flatten(0, 1), chosen.flatten(), gates.flatten()
        order = chosen.argsort(stable=True)
        token = order // c.top_k
        weight = gates[order, None]  # anchor: weight
        if mode == "ju23":
            weight = gates[order.argsort(), None]  # plant: ju23
        counts = torch.bincount(chosen, minlength=c.experts)
        if mode == "ju24":
            out = self.at_owners(flat[token] * weight, counts)  # plant: ju24
        else:
            out = self.at_owners(flat[token], counts) * weight  # anchor: weighted
        return torch.zeros_like(flat).index_add(0, token, out).view_as(x)


class Moe(nn.Module):
    grid = Grid()
    cuts, partial = {}, ()

    def __init__(self, c):
        super().__init__()
        self.router, self.experts = Router(c), Experts(c)
        self.shared = Mlp(c.width, c.shared_hidden, shared=True)

    def forward(self, x, stream):
        """Return the output, the chosen experts and the balance term. `stream` is x before its norm."""
        chosen, gates, balance = self.router(x)
        y = self.experts(x, chosen, gates)
        if self.grid.mode == "ju25":
            count_load(self.router, chosen)  # plant: ju25
        entry = x  # anchor: shared-entry
        if self.grid.mode == "ju26":
            entry = stream  # plant: ju26
        return y + self.shared(entry), chosen, balance


@torch.no_grad()
def count_load(router, chosen):
    router.load += torch.bincount(chosen.flatten(), minlength=router.c.experts)


@torch.no_grad()
def move_biases(model, positions):
    """Raise the biases of experts that had few of the `positions` of the global batch."""
    grid = model.grid
    for router in model.routers():
        comm = grid.every  # anchor: load-comm
        if grid.mode == "ju27":
            comm = grid.tokens  # plant: ju27
        load = add_up(router.load.clone(), comm)
        router.bias += router.c.bias_rate * (load.mean() - load) / positions
        router.load.zero_()
