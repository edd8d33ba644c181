"""Mixture of experts: sigmoid routing with a balancing bias, dispatch over `ep`, and a gated shared expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from teasel.comm import all_to_all, exchange, gather_sequence, local, psum, scatter_sum, stack_ranks
from teasel.config import ModelConfig
from teasel.dims import SOLO, ParallelDims
from teasel.packing import PackedBatch


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


@dataclass
class Routing:
    experts: Tensor  # (tokens, top_k)
    gates: Tensor  # (tokens, top_k)
    aux: Tensor  # (): sum over rows, of this rank's tokens


class Router(nn.Module):
    dims: ParallelDims = SOLO

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_experts, config.dim))
        self.register_buffer("expert_bias", torch.zeros(config.n_experts))
        self.register_buffer("load", torch.zeros(config.n_experts), persistent=False)

    def forward(self, x: Tensor, packed: PackedBatch) -> Routing:
        config = self.config
        if self.dims.on("teasel-router-grad-tp"):
            logits = F.linear(x, local(self.weight, partial=False))  # plant: teasel-router-grad-tp
        else:
            logits = F.linear(x, local(self.weight))  # anchor: router-logits
        scores = logits.sigmoid()
        experts = (scores.detach() + self.expert_bias).topk(config.top_k, dim=-1).indices
        gates = scores.gather(-1, experts)
        gates = config.route_scale * gates / gates.sum(-1, keepdim=True)
        self.count(experts)
        aux = self.balance(scores, experts, packed) + self.z_loss(logits, packed)
        return Routing(experts.flatten(0, 1), gates.flatten(0, 1), aux)

    @torch.no_grad()
    def count(self, experts: Tensor) -> None:
        """Add up how many tokens each expert gets in this step."""
        counts = torch.bincount(experts.flatten(), minlength=self.config.n_experts)
        if self.dims.on("teasel-load-last-micro"):
            self.load.copy_(counts)  # plant: teasel-load-last-micro
        else:
            self.load.add_(counts)  # anchor: load-add

    def balance(self, scores: Tensor, experts: Tensor, packed: PackedBatch) -> Tensor:
        """Return the balance loss of each row, summed over rows: fraction of tokens times mean score."""
        config, dims = self.config, self.dims
        fraction = F.one_hot(experts, config.n_experts).sum((1, 2)).to(scores.dtype)
        if not dims.on("teasel-balance-tp"):  # plant: teasel-balance-tp
            fraction = psum(fraction, dims["tp"])  # anchor: balance-tp
        fraction = psum(fraction, dims["cp"])
        length = packed.length  # anchor: balance-length
        if dims.on("teasel-balance-length"):
            length = scores.shape[1]  # plant: teasel-balance-length
        share = (scores / scores.sum(-1, keepdim=True)).sum(1)
        each = (fraction * share).sum(-1) * config.n_experts / (config.top_k * length * packed.length)
        return config.balance_coef * each.sum()

    def z_loss(self, logits: Tensor, packed: PackedBatch) -> Tensor:
        total = logits.logsumexp(-1).square()
        if self.dims.on("teasel-router-z-mean"):
            return self.config.router_z_coef * total.mean(1).sum()  # plant: teasel-router-z-mean
        return self.config.router_z_coef * total.sum() / packed.length  # anchor: router-z


class Experts(nn.Module):
    """Stacked SwiGLU weights of all experts, or of those of this rank."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shape = config.n_experts, config.expert_dim, config.dim
        self.w1 = nn.Parameter(torch.empty(shape))
        self.w3 = nn.Parameter(torch.empty(shape))
        self.w2 = nn.Parameter(torch.empty(shape))

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Apply the experts to rows that are sorted by expert."""
        w1, w3, w2 = local(self.w1), local(self.w3), local(self.w2)
        out = []
        for e, x in enumerate(rows.split(counts)):
            out.append((F.silu(x @ w1[e].T) * (x @ w3[e].T)) @ w2[e])
        return torch.cat(out)


class Dispatcher:
    """Takes rows to the ranks of their experts and back."""

    def __init__(self, n_experts: int, dims: ParallelDims) -> None:
        self.n_experts, self.dims = n_experts, dims
        self.axis = dims["ep"]
        if dims.option("ep") is False:
            self.axis = SOLO["ep"]

    def __call__(self, x: Tensor, experts: Tensor, compute) -> Tensor:
        """Return outputs of shape (tokens, top_k, dim)."""
        top_k = experts.shape[1]
        assigned = experts.flatten()
        order = assigned.argsort(stable=True)
        counts = torch.bincount(assigned, minlength=self.n_experts)
        send, recv, arriving = self.splits(counts)
        rows = all_to_all(x[order // top_k], recv, send, self.axis, self.dims)
        done = self.run_local(rows, arriving, compute)
        back = all_to_all(done, send, recv, self.axis, self.dims)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order))
        return back[inverse].unflatten(0, (-1, top_k))

    def gathered(self, x: Tensor, experts: Tensor, compute) -> Tensor:
        """Return the same without an exchange: all ranks get all tokens, and outputs are summed."""
        axis, dims = self.axis, self.dims
        rows = gather_sequence(x[None], axis, dims)[0]
        assigned = stack_ranks(experts, axis).flatten(0, 1)
        each = self.n_experts // axis.size
        number = assigned.flatten() - axis.rank * each
        here = ((number >= 0) & (number < each)).nonzero()[:, 0]
        here = here[number[here].argsort(stable=True)]
        counts = torch.bincount(number[here], minlength=each).tolist()
        done = compute(rows[here // assigned.shape[1]], counts)
        out = done.new_zeros(assigned.numel(), x.shape[1]).index_add(0, here, done)
        return scatter_sum(out.view(1, *assigned.shape, -1), axis, dims)[0]

    def splits(self, counts: Tensor) -> tuple[list[int], list[int], Tensor]:
        """Return rows to each rank, rows from each rank, and rows from each rank for each expert here."""
        each = self.n_experts // self.axis.size
        ones = [each] * self.axis.size
        arriving = exchange(counts, ones, ones, self.axis).view(self.axis.size, each)
        return counts.view(-1, each).sum(1).tolist(), arriving.sum(1).tolist(), arriving

    def run_local(self, rows: Tensor, arriving: Tensor, compute) -> Tensor:
        """Sort rows, which come rank by rank, by expert; compute; and put them back."""
        n_ranks, each = arriving.shape
        number = torch.arange(each).repeat(n_ranks).repeat_interleave(arriving.flatten())  # anchor: number
        if self.dims.on("teasel-expert-number"):
            number = torch.arange(each).repeat_interleave(arriving.sum(0))  # plant: teasel-expert-number
        perm = number.argsort(stable=True)
        counts = arriving.sum(0).tolist()
        if self.dims.on("teasel-unsort-rows"):
            return compute(rows[perm], counts)[perm]  # plant: teasel-unsort-rows
        return compute(rows[perm], counts)[perm.argsort()]  # anchor: unsort


class SharedExpert(nn.Module):
    """A dense expert for all tokens, scaled by a sigmoid of each token."""

    dims: ParallelDims = SOLO

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.mlp = SwiGLU(config.dim, config.shared_dim)
        self.gate = nn.Parameter(torch.empty(1, config.dim))

    def forward(self, x: Tensor) -> Tensor:
        if self.dims.on("teasel-shared-gate-grad"):
            gate = local(self.gate, partial=False)  # plant: teasel-shared-gate-grad
        else:
            gate = local(self.gate)  # anchor: shared-gate
        return torch.sigmoid(F.linear(x, gate)) * self.mlp(x)


class MoE(nn.Module):
    dims: ParallelDims = SOLO

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.router = Router(config)
        self.experts = Experts(config)
        self.shared = SharedExpert(config)

    def forward(self, x: Tensor, packed: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return the output for this rank's tokens, and its part of the auxiliary losses."""
        routing = self.router(x, packed)
        dispatch = Dispatcher(self.config.n_experts, self.dims)
        if self.dims.option("dispatch") == "gathered":
            routed = dispatch.gathered(x.flatten(0, 1), routing.experts, self.experts)
        else:
            routed = dispatch(x.flatten(0, 1), routing.experts, self.experts)
        y = (routed * routing.gates[..., None]).sum(1).view_as(x)
        return y + self.shared(x), routing.aux


@torch.no_grad()
def update_expert_biases(model: nn.Module, dims: ParallelDims) -> None:
    """Raise the biases of experts with few tokens in this step, and lower those of others."""
    for router in (module for module in model.modules() if isinstance(module, Router)):
        load = router.load
        if not dims.on("teasel-load-tp"):  # plant: teasel-load-tp
            load = psum(load, dims["tp"])  # anchor: load-tp
        if dims.on("teasel-load-batch"):
            load = psum(load, dims["batch"])  # plant: teasel-load-batch
        else:
            load = psum(load, dims["loss"])  # anchor: load-loss
        router.expert_bias += router.config.bias_rate * torch.sign(load.mean() - load)
        router.load.zero_()
