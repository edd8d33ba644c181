"""A mixture of experts: router, exchange of rows over ranks, experts, and a gated shared expert."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from hazel.comm import all_reduce, all_to_all, copy_to, local, reduce_from, sum_over
from hazel.context import Part
from hazel.layers import SwiGLU


class Experts(Part):
    """SwiGLU of rows that are sorted by expert. `counts` has the rows of each."""

    def __init__(self, cfg):
        super().__init__()
        e, d, h = cfg.experts, cfg.width, cfg.expert_hidden
        self.w_gate = nn.Parameter(torch.randn(e, d, h) * d**-0.5)
        self.w_up = nn.Parameter(torch.randn(e, d, h) * d**-0.5)
        self.w_down = nn.Parameter(torch.randn(e, h, d) * h**-0.5)

    def forward(self, rows, counts):
        gate, up, down = (local(w) for w in (self.w_gate, self.w_up, self.w_down))
        if self.ctx.on("hazel-same-index"):
            expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
            hidden = F.silu(torch.einsum("td,tdh->th", rows, gate[expert]))
            hidden = hidden * torch.einsum("td,tdh->th", rows, up[expert])
            return torch.einsum("th,thd->td", hidden, down[expert])
        outs = []
        for i, part in enumerate(rows.split(counts)):
            outs.append((F.silu(part @ gate[i]) * (part @ up[i])) @ down[i])
        return torch.cat(outs)


def exchange(rows, counts, experts, pc):
    """Send rows, sorted by expert, to the ranks of the experts, and return their outputs in the same order."""
    ranks, group = pc.ep_size, pc.ep
    arriving = torch.empty_like(counts)
    if group is None:
        arriving.copy_(counts)
    else:
        dist.all_to_all_single(arriving, counts, group=group)
    arriving = arriving.view(ranks, -1)  # (source rank, own expert)
    send, receive = counts.view(ranks, -1).sum(1).tolist(), arriving.sum(1).tolist()
    got = all_to_all(rows, receive, send, group)
    own = torch.arange(arriving.shape[1]).repeat(ranks)
    order = own.repeat_interleave(arriving.flatten()).argsort(stable=True)
    out = experts(got[order], arriving.sum(0).tolist())
    out = out[order.argsort()]  # anchor: exchange-order
    return all_to_all(out, send, receive, group)


class MoE(Part):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.router = nn.Linear(cfg.width, cfg.experts, bias=False)
        self.experts = Experts(cfg)
        self.shared = SwiGLU(cfg.width, cfg.shared_hidden)
        self.shared_gate = nn.Linear(cfg.width, 1, bias=False)
        # Shares of the experts in the step before, of all ranks.
        self.register_buffer("prior", torch.full((cfg.experts,), 1 / cfg.experts))
        self.register_buffer("load", torch.zeros(cfg.experts), persistent=False)

    def forward(self, x, valid):
        """Return outputs, counts of tokens by expert, and the two balance terms, as sums over tokens."""
        pc, tp = self.ctx, self.ctx.group("tp")
        inside = copy_to(x, tp)
        seen = inside if pc.on("hazel-router-region") else x  # plant: hazel-router-region
        probs = self.router(seen).softmax(-1)  # anchor: router-input
        weights, ids = probs.topk(self.cfg.top_k, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        stats = self.balance(probs, ids, valid)
        weights = copy_to(weights, tp)
        routed = reduce_from(self.route(inside.flatten(0, 1), ids.flatten(0, 1), weights.flatten(0, 1)), tp)
        gated = inside if pc.on("hazel-gate-region") else x  # plant: hazel-gate-region
        gate = self.shared_gate(gated).sigmoid()  # anchor: gate-input
        return routed.view_as(x) + gate * self.shared(x), *stats

    def route(self, x, ids, weights):
        cfg, pc = self.cfg, self.ctx
        chosen = ids.flatten()
        order = chosen.argsort(stable=True)
        token = order // cfg.top_k  # anchor: token
        if pc.on("hazel-token-index"):
            token = order % len(x)  # plant: hazel-token-index
        out = exchange(x[token], chosen.bincount(minlength=cfg.experts), self.experts, pc)
        if pc.on("hazel-same-gather"):
            back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
            return (out[back].unflatten(0, ids.shape) * weights[..., None]).sum(1)
        out = out * weights.flatten()[order][:, None]
        return torch.zeros_like(x).index_add(0, token, out)

    def balance(self, probs, ids, valid):
        cfg, pc, group = self.cfg, self.ctx, self.ctx.group("cp")
        on = valid[..., None].to(probs.dtype)
        hits = F.one_hot(ids, cfg.experts).sum(2)
        counts = (hits * on).sum((0, 1))  # anchor: counts
        if pc.on("hazel-load-padding"):
            counts = hits.sum((0, 1)).to(probs.dtype)  # plant: hazel-load-padding
        if pc.on("hazel-balance-detached"):
            probs = probs.detach()  # plant: hazel-balance-detached
        batch = cfg.experts * ((probs * on).sum((0, 1)) * self.prior).sum()
        if pc.on("hazel-sequence-local"):
            group = None  # plant: hazel-sequence-local
        if pc.on("hazel-sequence-flat"):
            hits, probs, on = (x.flatten(0, 1)[None] for x in (hits, probs, on))  # plant: hazel-sequence-flat
        own = on.sum((1, 2))
        length = sum_over(own, group)
        share = sum_over((hits * on).sum(1), group) / (cfg.top_k * length[:, None])
        mean = sum_over((probs * on).sum(1), group) / length[:, None]
        terms = cfg.experts * (share * mean).sum(-1)
        if pc.on("hazel-same-leader"):
            own = length if pc.rank("cp") == 0 else torch.zeros_like(length)
        if pc.on("hazel-sequence-length"):
            own = length  # plant: hazel-sequence-length
        return counts.detach(), batch, (terms * own).sum()  # anchor: sequence

    @torch.no_grad()
    def count(self, counts):
        if self.ctx.on("hazel-load-overwrite"):
            self.load.copy_(counts)  # plant: hazel-load-overwrite
        else:
            self.load += counts  # anchor: load

    @torch.no_grad()
    def end_step(self):
        """Take the loads of the step as shares for the next one."""
        load = all_reduce(self.load.clone(), self.ctx.group("dp_replicate", "dp_shard", "cp"))
        self.prior.copy_(load / load.sum())
        self.load.zero_()
