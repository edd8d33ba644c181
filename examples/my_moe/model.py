"""A small mixture of experts with its author's own loss and expert parallelism."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F


class Experts(nn.Module):
    """The MLPs of all experts, or of one rank's experts, as two stacked weights."""

    def __init__(self, num_experts: int, width: int) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(num_experts, width, 2 * width) * 0.2)
        self.w_out = nn.Parameter(torch.randn(num_experts, 2 * width, width) * 0.2)

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        """Run rows that are sorted by expert; `counts` has the number of rows of each."""
        w_in, w_out = self.w_in, self.w_out
        if isinstance(w_in, DTensor):
            w_in, w_out = w_in.to_local(), w_out.to_local()
        parts = x.split(counts)
        return torch.cat([F.silu(part @ w_in[e]) @ w_out[e] for e, part in enumerate(parts)])


class Mixture(nn.Module):
    def __init__(self, width: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.experts = Experts(num_experts, width)
        self.top_k = top_k
        self.exchange: Exchange | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x)
        weights, chosen = scores.softmax(-1).topk(self.top_k, dim=-1)
        copies = chosen.flatten()
        order = copies.argsort(stable=True)
        rows = x.flatten(0, -2)[order // self.top_k]
        counts = copies.bincount(minlength=scores.shape[-1])
        if self.exchange is None:
            y = self.experts(rows, counts.tolist())
        else:
            y = self.exchange(rows, counts, self.experts)
        back = torch.empty_like(y).index_copy(0, order, y)
        mixed = back.unflatten(0, (-1, self.top_k)) * weights.flatten(0, -2)[..., None]
        return mixed.sum(1).view_as(x), scores


class MoE(nn.Module):
    def __init__(self, vocab: int, width: int, num_layers: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.mix = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(num_layers))
        self.tower = nn.ModuleList(Mixture(width, num_experts, top_k) for _ in range(num_layers))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(num_layers))
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        x, scores = self.tokens(tokens), []
        for mix, mixture, norm in zip(self.mix, self.tower, self.norms, strict=True):
            x = x + mix(torch.cat([x, F.pad(x, (0, 0, 1, -1))], dim=-1))  # each token and the previous one
            y, score = mixture(norm(x))
            x = x + y
            scores.append(score)
        return self.head(x), scores


def make(vocab: int = 80, width: int = 16, num_layers: int = 2, num_experts: int = 8, top_k: int = 2) -> MoE:
    """Return the model with initial values drawn in float64: those of float32 depend on the processor."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return MoE(vocab, width, num_layers, num_experts, top_k).float()
    finally:
        torch.set_default_dtype(before)


def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return cross entropy plus a z loss on the gates, summed over the valid tokens."""
    logits, scores = model(tokens)
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    counts = targets != -100
    return total + 0.01 * sum((score.logsumexp(-1)[counts] ** 2).sum() for score in scores)


def parallelize(model: MoE, mesh: DeviceMesh) -> tuple[MoE, Callable[[], None]]:
    """Spread the experts over `dp_shard`, shard the rest with FSDP2, replicate all over `dp_replicate`."""
    weights = spread_experts(model, mesh["dp_shard"])
    replicated = mesh["dp_replicate"].size() > 1
    data = mesh["dp_replicate", "dp_shard"] if replicated else mesh["dp_shard"]
    fully_shard(model, mesh=data, ignored_params=set(weights))

    def finish() -> None:
        """Average the experts' gradients, which already include the tokens of all ranks of `dp_shard`."""
        for weight in weights:
            gradient = weight.grad.to_local()
            dist.all_reduce(gradient, group=mesh["dp_replicate"].get_group())
            gradient /= data.size()

    return model, finish


def spread_experts(model: MoE, mesh: DeviceMesh) -> list[nn.Parameter]:
    """Give each rank its part of the experts, and return their weights."""
    weights = []
    for mixture in model.tower:
        mixture.exchange = Exchange(mesh)
        for name, weight in list(mixture.experts.named_parameters()):
            sharded = nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)]))
            setattr(mixture.experts, name, sharded)
            weights.append(sharded)
    return weights


class Exchange:
    """An exchange that sends rows to the ranks of their experts, and returns the results."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group = mesh.get_group()
        self.num_ranks = mesh.size()

    def __call__(self, rows: Tensor, counts: Tensor, experts: Experts) -> Tensor:
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        arriving = arriving.view(self.num_ranks, -1)  # from each rank, for each expert here
        send, receive = counts.view(self.num_ranks, -1).sum(1).tolist(), arriving.sum(1).tolist()
        received = AllToAll.apply(rows, receive, send, self.group)
        expert = torch.arange(arriving.shape[1]).repeat(self.num_ranks)
        order = expert.repeat_interleave(arriving.flatten().cpu()).argsort(stable=True).to(rows.device)
        y = experts(received[order], arriving.sum(0).tolist())
        unsorted = torch.empty_like(y).index_copy(0, order, y)
        return AllToAll.apply(unsorted, send, receive, self.group)


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
