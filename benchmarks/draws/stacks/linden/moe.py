"""Feed-forward layers: a dense one, and routed experts beside a shared one."""

import torch
import torch.distributed as dist
from torch.nn import functional as F

from linden.coll import enter, leave, trade
from linden.topo import all_sum


def gated(x, gate, up, down):
    """Apply weights of shapes (width, hidden), (width, hidden) and (hidden, width)."""
    return (F.silu(x @ gate) * (x @ up)) @ down


def dense(p, x, topo):
    return leave(gated(enter(x, topo.tp), p["d_gate"], p["d_up"], p["d_down"]), topo.tp)


def route(p, x, sizes, topo):
    """Return chosen experts, their gates, and the terms of the router, of (rows, positions, width)."""
    logits = torch.einsum("btd,ed->bte", x, p["router"])
    scores = logits.sigmoid()
    ranked = scores + p["bias"]  # anchor: ranked
    if topo.on("linden-rank-raw"):
        ranked = scores  # plant: linden-rank-raw
    chosen = ranked.detach().topk(sizes.top_k, -1).indices
    gates = scores.gather(-1, chosen)
    if topo.on("linden-gates-rows"):
        gates = sizes.gate_scale * gates / gates.sum(1, keepdim=True)  # plant: linden-gates-rows
    else:
        gates = sizes.gate_scale * gates / gates.sum(-1, keepdim=True)  # anchor: gates
    # The terms move the router, and not the stream before it.
    seen = x.detach()  # anchor: detached
    if topo.on("linden-terms-through"):
        seen = x  # plant: linden-terms-through
    logits = torch.einsum("btd,ed->bte", seen, p["router"])
    z = sizes.router_z_coef * logits.logsumexp(-1).square().sum()
    return chosen, gates, z + balance(logits.sigmoid(), chosen, sizes, topo)


def balance(scores, chosen, sizes, topo):
    """Return the sum over rows of tokens of an expert times its mean share of the scores."""
    counts = F.one_hot(chosen, sizes.experts).sum((1, 2)).to(scores.dtype)
    counts = all_sum(counts, topo.cp)
    share = (scores / scores.sum(-1, keepdim=True)).sum(1)
    length = scores.shape[1] * topo.cp.size
    return sizes.balance_coef * sizes.experts * (counts * share).sum() / (sizes.top_k * length)


def run_experts(p, rows, counts):
    """Apply each expert of this rank to its rows, which stand one expert after the other."""
    out = []
    for e, part in enumerate(rows.split(counts)):
        gate, up = part @ p["e_gate"][e], part @ p["e_up"][e]
        out.append((F.silu(gate) * up) @ p["e_down"][e])
    return torch.cat(out)


def at_owners(p, rows, numbers, sizes, topo):
    """Bring rows, sorted by the number of their expert, to the ranks of the experts and back."""
    ep = topo.ep
    sent = torch.bincount(numbers, minlength=sizes.experts).view(ep.size, -1)
    got = sent
    if ep.size > 1:
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=ep.pg)
    give, take = sent.sum(1).tolist(), got.sum(1).tolist()
    rows = trade(rows, give, take, ep)
    local = got.shape[1]
    sizes_of = got.flatten()  # anchor: sizes-of
    if topo.on("linden-got-order"):
        sizes_of = got.t().flatten()  # plant: linden-got-order
    owner = torch.arange(local).repeat(ep.size).repeat_interleave(sizes_of)
    order = owner.argsort(stable=True)
    done = run_experts(p, rows[order], torch.bincount(owner, minlength=local).tolist())
    back = done[order.argsort()]
    return trade(back, take, give, ep)


def routed(p, x, chosen, gates, sizes, topo):
    """Return the sum of the gated outputs of chosen experts, of this rank's hidden units."""
    tp, k = topo.tp, sizes.top_k
    flat = enter(x, tp).flatten(0, 1)  # anchor: experts-enter
    if topo.on("linden-experts-enter"):
        flat = x.flatten(0, 1)  # plant: linden-experts-enter
    if not topo.on("linden-gates-enter"):  # plant: linden-gates-enter
        gates = enter(gates, tp)  # anchor: gates-enter
    chosen = chosen.flatten()
    order = chosen.argsort(stable=True)
    token = order // k  # anchor: token
    if topo.on("linden-token-modulo"):
        token = order % len(flat)  # plant: linden-token-modulo
    out = at_owners(p, flat[token], chosen[order], sizes, topo)
    out = out[order.argsort()].unflatten(0, (-1, k))
    return torch.einsum("tkd,tk->td", out, gates.flatten(0, 1)).view_as(x)


def experts(p, x, sizes, topo):
    """Return the output of the layer, the chosen experts, and the terms of the router."""
    tp = topo.tp
    chosen, gates, terms = route(p, x, sizes, topo)
    y = routed(p, x, chosen, gates, sizes, topo)
    shared = gated(enter(x, tp), p["s_gate"], p["s_up"], p["s_down"])
    open_ = (x @ p["s_mix"]).sigmoid()[..., None]
    if topo.on("linden-shared-again"):
        y = leave(y + enter(open_, tp) * leave(shared, tp), tp)  # plant: linden-shared-again
        return y, chosen, terms
    shared = leave(shared, tp)  # anchor: shared
    if topo.on("linden-shared-gate"):
        open_ = (shared @ p["s_mix"]).sigmoid()[..., None]  # plant: linden-shared-gate
    return leave(y, tp) + open_ * shared, chosen, terms


@torch.no_grad()
def move_bias(net):
    """Move the biases towards experts that had few tokens of the global batch."""
    sizes, topo = net.sizes, net.topo
    for i in net.routers():
        bias, load = net.leaf(i, "bias"), net.leaf(i, "load")
        whole = all_sum(load.clone(), topo.data)
        bias += sizes.bias_rate * (whole.mean() - whole) / whole.mean()
        if not topo.on("linden-load-kept"):  # plant: linden-load-kept
            load.zero_()


@torch.no_grad()
def count_load(net, i, chosen):
    net.leaf(i, "load").add_(torch.bincount(chosen.flatten(), minlength=net.sizes.experts))
