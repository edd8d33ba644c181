"""Sigmoid router with limited groups and a bias without gradients, and experts on many ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from sorrel.comms import exchange_rows, reduce_
from sorrel.grid import EXPERT, GridModule
from sorrel.layers import GatedFFN


class Router(GridModule):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.randn(config.experts, config.width) * config.width**-0.5)
        self.register_buffer("bias", 0.3 * torch.randn(config.experts) - 0.4)
        self.register_buffer("load", torch.zeros(config.experts), persistent=False)

    def forward(self, x):
        """Return chosen experts, weights, and the terms of z and balance, of (rows, positions, width)."""
        c, grid = self.config, self.grid
        logits = F.linear(x, self.weight)
        scores = logits.sigmoid()
        biased = scores + self.bias
        grouped = biased.unflatten(-1, (c.expert_groups, -1))
        if grid.has("sorrel-group-max"):
            group_scores = grouped.amax(-1)  # plant: sorrel-group-max
        else:
            group_scores = grouped.topk(2, -1).values.sum(-1)  # anchor: group-scores
        kept = group_scores.topk(c.kept_groups, -1).indices
        mask = torch.ones_like(group_scores, dtype=torch.bool).scatter(-1, kept, False)
        outside = 0.0 if grid.has("sorrel-group-zero") else -torch.inf  # plant: sorrel-group-zero
        eligible = grouped.masked_fill(mask[..., None], outside).flatten(-2)  # anchor: eligible
        chosen = eligible.topk(c.top_k, -1).indices
        if grid.has("sorrel-gate-biased"):
            weights = biased.gather(-1, chosen)  # plant: sorrel-gate-biased
        else:
            weights = scores.gather(-1, chosen)  # anchor: gate
        weights = c.route_scale * weights / weights.sum(-1, keepdim=True)
        z = c.z_coef * logits.logsumexp(-1).square().sum()
        return chosen, weights, z, self.balance(scores, chosen)

    def balance(self, scores, chosen):
        """Return the sum over rows of the term that is small if a row spreads over the experts."""
        c, grid = self.config, self.grid
        counts = F.one_hot(chosen, c.experts).sum((1, 2)).to(scores.dtype)
        if not grid.has("sorrel-balance-own"):  # plant: sorrel-balance-own
            counts = reduce_(counts, grid.group("cp", "tp"))  # anchor: row-counts
        length = scores.shape[1] * grid.size("cp", "tp")  # anchor: row-length
        if grid.has("sorrel-balance-length"):
            length = scores.shape[1] * grid.size("tp")  # plant: sorrel-balance-length
        share = (scores / scores.sum(-1, keepdim=True)).sum(1) / length
        return c.balance_coef * (counts * (c.experts / c.top_k) * share).sum()

    @torch.no_grad()
    def count(self, chosen):
        self.load += torch.bincount(chosen.flatten(), minlength=self.config.experts)

    @torch.no_grad()
    def update_bias(self):
        """Move the bias against the loads of the global batch, and forget them."""
        grid = self.grid
        axes = ("dp_replicate", "dp_shard", "cp", "tp")  # anchor: load-axes
        if grid.has("sorrel-load-tp"):
            axes = ("dp_replicate", "dp_shard", "cp")  # plant: sorrel-load-tp
        load = reduce_(self.load.clone(), grid.group(*axes))
        self.bias += self.config.bias_rate * (load.mean() - load).sign()
        self.load.zero_()


class Experts(nn.Module):
    def __init__(self, config):
        super().__init__()
        count, width, hidden = config.experts, config.width, config.expert_hidden
        self.gate_up = nn.Parameter(torch.randn(count, width, 2 * hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(count, hidden, width) * hidden**-0.5)

    def forward(self, rows, sizes):
        """Apply each expert to its rows, which stand in the order of experts."""
        out = []
        for part, gate_up, down in zip(rows.split(sizes), self.gate_up, self.down, strict=True):
            gate, up = (part @ gate_up).chunk(2, -1)
            out.append((F.silu(gate) * up) @ down)
        return torch.cat(out)


class MoE(GridModule):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.router, self.experts = Router(config), Experts(config)
        self.shared = GatedFFN(config.width, config.expert_hidden)

    def forward(self, x):
        chosen, weights, z, balance = self.router(x)
        routed = self.dispatch(x.flatten(0, 1), chosen.flatten(0, 1), weights.flatten(0, 1))
        return routed.view_as(x) + self.shared(x), chosen, z, balance

    def dispatch(self, x, chosen, weights):
        c, grid = self.config, self.grid
        group, ranks = grid.group(*EXPERT), grid.size(*EXPERT)
        order = chosen.flatten().argsort(stable=True)
        sent = torch.bincount(chosen.flatten(), minlength=c.experts).view(ranks, -1)
        got = sent
        if group is not None:
            got = torch.empty_like(sent)
            dist.all_to_all_single(got, sent, group=group)
        sizes = got.sum(1).tolist(), sent.sum(1).tolist()
        rows = exchange_rows(x[order // c.top_k], *sizes, group)
        names = torch.arange(got.shape[1]).repeat(ranks)  # anchor: names
        if grid.has("sorrel-names-order"):
            names = torch.arange(got.shape[1]).repeat_interleave(ranks)  # plant: sorrel-names-order
        names = names.repeat_interleave(got.flatten())
        by_expert = names.argsort(stable=True)
        done = self.experts(rows[by_expert], torch.bincount(names, minlength=got.shape[1]).tolist())
        if grid.has("sorrel-back-order"):
            back = done[by_expert]  # plant: sorrel-back-order
        else:
            back = torch.empty_like(done).index_copy(0, by_expert, done)  # anchor: back
        out = exchange_rows(back, *reversed(sizes), group)
        factor = weights.flatten()[order]  # anchor: factor
        if grid.has("sorrel-factor-order"):
            factor = weights.flatten()  # plant: sorrel-factor-order
        if grid.has("sorrel-same-inverse"):
            return (out * factor[:, None])[order.argsort()].unflatten(0, (-1, c.top_k)).sum(1)
        return torch.zeros_like(x).index_add(0, order // c.top_k, out * factor[:, None])
