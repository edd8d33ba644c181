"""Ways to move tokens to experts: an exchange over data ranks, or all tokens on each rank."""

import torch
import torch.distributed as dist
from torch import Tensor


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, receive, send, group):
        ctx.sizes = send, receive, group
        rows = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(rows, x.contiguous(), receive, send, group=group)
        return rows

    @staticmethod
    def backward(ctx, gradient):
        return AllToAll.apply(gradient, *ctx.sizes), None, None, None


class Copy(torch.autograd.Function):
    """Identity on all ranks; gradients are summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Sum(torch.autograd.Function):
    """The sum over ranks; each part gets its gradient unchanged."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Exchange:
    """An exchange that sends rows and weights to the ranks of their experts, and returns the results."""

    def __init__(self, mesh) -> None:
        self.group, self.num_ranks = mesh.get_group(), mesh.size()

    def __call__(self, rows: Tensor, weights: Tensor, chosen: Tensor, experts) -> Tensor:
        slots = chosen.flatten()
        order = slots.argsort(stable=True)
        counts = slots.bincount(minlength=experts.num_experts)
        token = order // chosen.shape[1]
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        arriving = arriving.view(self.num_ranks, -1)
        send, receive = counts.view(self.num_ranks, -1).sum(1).tolist(), arriving.sum(1).tolist()
        packed = torch.cat([rows[token], weights.flatten()[order][:, None]], -1)
        packed = AllToAll.apply(packed, receive, send, self.group)
        expert = torch.arange(arriving.shape[1]).repeat(self.num_ranks)
        place = expert.repeat_interleave(arriving.flatten()).argsort(stable=True)
        packed = packed[place]
        y = experts(packed[:, :-1], packed[:, -1], arriving.sum(0).tolist())
        y = torch.empty_like(y).index_copy(0, place, y)
        y = AllToAll.apply(y, send, receive, self.group)
        return torch.zeros_like(rows).index_add(0, token, y)


class Masked:
    """A dispatcher with all tokens on every rank: each computes its own experts, and results are summed."""

    def __init__(self, mesh, num_experts: int, options: dict) -> None:
        self.group = mesh.get_group()
        self.here = num_experts // mesh.size()
        self.first = mesh.get_local_rank() * self.here
        self.absent = options.get("absent", self.here)  # plant: p45
        self.dense = options.get("dense", False)

    def __call__(self, rows: Tensor, weights: Tensor, chosen: Tensor, experts) -> Tensor:
        rows, weights = Copy.apply(rows, self.group), Copy.apply(weights, self.group)
        if self.dense:
            matrix = weights.new_zeros(len(rows), experts.num_experts).scatter(
                1, chosen, weights
            )  # plant: p46
            weights = matrix[:, self.first : self.first + self.here]  # plant: p46
        slots = chosen.flatten() - self.first
        mine = (slots >= 0) & (slots < self.here)
        slots = torch.where(mine, slots, self.absent)  # plant: p45
        order = slots.argsort(stable=True)[: int(mine.sum())]  # plant: p45
        counts = slots[mine].bincount(minlength=self.here).tolist()
        token = order // chosen.shape[1]
        y = experts(rows[token], weights.flatten()[order], counts)  # plant: p46
        return Sum.apply(torch.zeros_like(rows).index_add(0, token, y), self.group)


class Sliced:
    """A dispatcher with all tokens and a hidden slice of each expert on every rank; results are summed."""

    def __init__(self, mesh, options: dict) -> None:
        self.group, self.size, self.index = mesh.get_group(), mesh.size(), mesh.get_local_rank()
        self.adapter = options.get("adapter", "partial")

    def __call__(self, rows: Tensor, weights: Tensor, chosen: Tensor, experts) -> Tensor:
        rows, weights = Copy.apply(rows, self.group), Copy.apply(weights, self.group)
        slots = chosen.flatten()
        order = slots.argsort(stable=True)
        counts = slots.bincount(minlength=experts.num_experts).tolist()
        token = order // chosen.shape[1]
        y = self.compute(experts, rows[token], weights.flatten()[order], counts)
        return Sum.apply(torch.zeros_like(rows).index_add(0, token, y), self.group)

    def compute(self, experts, rows: Tensor, probs: Tensor, counts: list[int]) -> Tensor:
        from torch.nn import functional as F

        from mystack.model import local

        gate, up, down, bias = (
            local(w) for w in (experts.w_gate, experts.w_up, experts.w_down, experts.b_down)
        )
        out = []
        if experts.rank:
            a, b = experts.adapter()
            inner = gate.shape[-1]
            a = Copy.apply(a, self.group)[..., self.index * inner : (self.index + 1) * inner]
        for e, (x, p) in enumerate(zip(rows.split(counts), probs.split(counts), strict=True)):
            h = F.silu(x @ gate[e]) * (x @ up[e])
            y = h @ down[e]
            if self.index == 0:
                y = y + bias[e]
            else:
                y = y + 0 * bias[e]
            if experts.rank:
                low = h @ a[e].T
                if self.adapter == "partial":
                    y = y + low @ Copy.apply(b[e], self.group)
                else:  # the adapter's own row-parallel projection gathers its result
                    y = y + Sum.apply(low, self.group) @ b[e]  # plant: p63
            out.append(p[:, None] * y)
        return torch.cat(out)
