"""A mixture of experts with a sigmoid router, whose bias balances the load without a loss."""

import torch
from torch import nn
from torch.nn import functional as F

from plover.layers import SwiGLU, identity
from plover.state import Parallel


class Router(nn.Module):
    def __init__(self, width, num_experts, top_k, scale):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_experts, width) * 0.3)
        self.register_buffer("bias", torch.zeros(num_experts))
        self.register_buffer("load", torch.zeros(num_experts), persistent=False)
        self.top_k, self.scale = top_k, scale
        self.ps = Parallel()

    def forward(self, x):
        if self.ps.using("plover-router-dtype"):
            scores = (
                F.linear(x.float(), self.weight.float()).sigmoid().to(x.dtype)
            )  # plant: plover-router-dtype
        else:
            scores = F.linear(x, self.weight).sigmoid()  # anchor: scores
        biased = scores + self.bias
        chosen = biased.topk(self.top_k, dim=-1).indices
        if self.ps.using("plover-bias-weights"):
            picked = biased.gather(-1, chosen)  # plant: plover-bias-weights
        else:
            picked = scores.gather(-1, chosen)  # anchor: picked
        if self.training and torch.is_grad_enabled():
            self.load += chosen.flatten().bincount(minlength=len(self.bias)).to(self.load.dtype)
        weights = picked / picked.sum(-1, keepdim=True) * self.scale
        return weights, chosen


class Experts(nn.Module):
    """All experts of a layer, or those of one rank, in stacked weights."""

    def __init__(self, num_experts, width, hidden):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(num_experts, hidden, width) * 0.2)
        self.w3 = nn.Parameter(torch.randn(num_experts, hidden, width) * 0.2)
        self.w2 = nn.Parameter(torch.randn(num_experts, width, hidden) * 0.2)

    def forward(self, rows, counts):
        """Run rows sorted by expert; `counts` has the number of rows of each."""
        outs = []
        for index, part in enumerate(rows.split(counts)):
            hidden = F.silu(part @ self.w1[index].t()) * (part @ self.w3[index].t())
            outs.append(hidden @ self.w2[index].t())
        return torch.cat(outs)


def sort_by_expert(chosen, num_experts):
    """Return the order of the (token, choice) pairs by expert, and the number of each expert."""
    flat = chosen.flatten()
    return flat.argsort(stable=True), flat.bincount(minlength=num_experts)


class LocalDispatch:
    def __init__(self, num_experts):
        self.num_experts = num_experts

    def __call__(self, experts, x, weights, chosen):
        order, counts = sort_by_expert(chosen, self.num_experts)
        y = experts(x[order // chosen.shape[-1]], counts.tolist())  # anchor: rows
        return combine(y, order, weights)


def combine(y, order, weights):
    """Return the weighted sums of the experts' outputs, which are sorted by expert."""
    back = torch.empty_like(y).index_copy(0, order, y)  # anchor: back
    return (back.unflatten(0, weights.shape) * weights[..., None]).sum(1)  # anchor: combine


class MoE(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.router = Router(config.width, config.experts, config.top_k, config.route_scale)
        self.experts = Experts(config.experts, config.width, config.expert_hidden)
        self.shared_experts = SwiGLU(config.width, config.shared_hidden)
        self.enter = self.leave = identity
        self.dispatch = LocalDispatch(config.experts)

    def forward(self, x):
        x = self.enter(x)
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat)
        y = self.dispatch(self.experts, flat, weights, chosen)
        return self.leave((y + self.shared_experts(flat)).view_as(x))
