"""Entry points: a model on a mesh, and the function that completes its gradients. Gradients are sums over `batch`,
since the loss is divided by the tokens of the whole batch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from osier.attention import LatentAttention
from osier.dims import Group, ParallelDims, group_of, install
from osier.model import Head, Vocabulary
from osier.moe import Experts, FeedForward, MoE
from osier.ops import all_gather

DATA = ("dp_replicate", "dp_shard", "cp")


def block_of(parameter: nn.Parameter, dim: int, group: Group) -> nn.Parameter:
    """Return this rank's block of a parameter."""
    own = nn.Parameter(parameter.detach().chunk(group.size, dim)[group.rank].clone())
    own.cut_over = group
    return own


def gate_up_rows(parameter: nn.Parameter, group: Group) -> nn.Parameter:
    """Return this rank's run of rows of both matrices, seen as one."""
    rows = parameter.detach().flatten(0, 1).chunk(group.size, 0)[group.rank]  # plant: osier-gate-up-rows
    own = nn.Parameter(rows.clone().unflatten(0, (2, -1)))
    own.cut_over = group
    return own


def cut(module: nn.Module, group: Group, **dim_of: int) -> None:
    for name, dim in dim_of.items():
        setattr(module, name, block_of(getattr(module, name), dim, group))


class GradSync:
    """Sums gradients over a group in flat buffers of a limited size."""

    def __init__(self, parameters: list[nn.Parameter], group: Group, dims: ParallelDims, limit: int = 4000):
        self.group, self.dims, self.buckets = group, dims, []
        members, numel = [], 0
        for parameter in reversed(parameters):
            if dims.has("osier-sync-matrices") and parameter.dim() < 2:  # plant: osier-sync-matrices
                continue
            members.append(parameter)
            numel += parameter.numel()
            if numel >= limit:
                self.buckets.append(members)
                members, numel = [], 0
        if members:
            self.buckets.append(members)

    @torch.no_grad()
    def __call__(self) -> None:
        if self.group.alone:
            return
        if self.dims.has("osier-same-sync"):
            for parameter in [p for bucket in self.buckets for p in bucket]:
                parameter.grad.copy_(all_gather(parameter.grad, self.group).sum(0))
            return
        flats = [torch.cat([p.grad.reshape(-1) for p in bucket]) for bucket in self.buckets]
        if self.dims.has("osier-sync-mean"):
            flats = [flat / self.group.size for flat in flats]  # plant: osier-sync-mean
        works = [dist.all_reduce(flat, group=self.group.pg, async_op=True) for flat in flats]
        for bucket, flat, work in zip(self.buckets, flats, works, strict=True):
            work.wait()
            for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.grad.copy_(part.view_as(parameter))


def replicate(model, mesh, *, flag=""):
    """Data and context parallelism: all weights on all ranks."""
    batch = group_of(mesh, *DATA)
    dims = ParallelDims(batch=batch, cp=group_of(mesh, "cp"), flag=flag)
    install(model, dims)
    if dims.has("osier-context-group"):
        batch = group_of(mesh, "dp_replicate")  # plant: osier-context-group
    return model, GradSync(list(model.parameters()), batch, dims)


def sharded_optimizer(model, mesh, *, flag=""):
    """The same, for a step whose optimizer reduces gradients."""
    install(model, ParallelDims(batch=group_of(mesh, *DATA), cp=group_of(mesh, "cp"), flag=flag))
    return model, lambda: None


def tensor(model, mesh, *, flag=""):
    """Heads, hidden units and rows of the vocabulary over `tp`, gradients summed over the data axes."""
    batch = group_of(mesh, *DATA)
    dims = ParallelDims(batch=batch, tp=group_of(mesh, "tp"), cp=group_of(mesh, "cp"), flag=flag)
    install(model, dims)
    for module in model.modules():
        if isinstance(module, LatentAttention):
            cut(module, dims.tp, q_up=0, kv_up=0, gate=0, out=1)
            if dims.has("osier-out-unmarked"):
                module.out = nn.Parameter(module.out.detach())  # plant: osier-out-unmarked
        elif isinstance(module, FeedForward):
            if dims.has("osier-gate-up-rows"):
                module.gate_up = gate_up_rows(module.gate_up, dims.tp)  # plant: osier-gate-up-rows
                cut(module, dims.tp, down=1)
            else:
                cut(module, dims.tp, gate_up=1, down=1)
        elif isinstance(module, Experts):
            cut(module, dims.tp, gate_up=2, down=2)
        elif isinstance(module, Vocabulary):
            cut(module, dims.tp, table=0)
        elif isinstance(module, Head):
            cut(module, dims.tp, weight=0)
    if dims.has("osier-tensor-group"):
        batch = group_of(mesh, *DATA, "tp")  # plant: osier-tensor-group
    return model, GradSync(list(model.parameters()), batch, dims)


def spread_experts(model: nn.Module, dims: ParallelDims) -> list[nn.Parameter]:
    """Give each rank of `ep` a run of the experts, and return its weights."""
    own = []
    for module in model.modules():
        if isinstance(module, MoE):
            cut(module.experts, dims.ep, gate_up=0, down=0)
            own += [module.experts.gate_up, module.experts.down]
    return own


def expert(model, mesh, *, flag=""):
    """Experts over `dp_shard`; all else is on all ranks."""
    batch = group_of(mesh, *DATA)
    ep, copies = group_of(mesh, "dp_shard"), group_of(mesh, "dp_replicate", "cp")
    dims = ParallelDims(batch=batch, ep=ep, expert_dp=copies, cp=group_of(mesh, "cp"), flag=flag)
    install(model, dims)
    spread = spread_experts(model, dims)
    known = {id(p) for p in spread}
    dense_sync = GradSync([p for p in model.parameters() if id(p) not in known], batch, dims)
    if dims.has("osier-expert-group"):
        copies = batch  # plant: osier-expert-group
    expert_sync = GradSync(spread, copies, dims)

    def finish():
        dense_sync()
        expert_sync()

    return model, finish


def fsdp(model, mesh, *, flag="", spread=True, by_layer=True):
    """FSDP2 over `dp_shard`, copies over `dp_replicate`, and experts over `dp_shard` if `spread`."""
    batch = group_of(mesh, "dp_replicate", "dp_shard")
    shard, copies = group_of(mesh, "dp_shard"), group_of(mesh, "dp_replicate")
    ep = shard if spread else Group()
    dims = ParallelDims(batch=batch, ep=ep, expert_dp=copies, flag=flag)
    install(model, dims)
    own = spread_experts(model, dims) if spread else []
    part = mesh["dp_shard"] if copies.alone else mesh["dp_replicate", "dp_shard"]
    options = {"mesh": part, "ignored_params": set(own)}
    layers = [*model.layers, model.ahead.layer] if by_layer else []
    for layer in layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    for module in [*layers, model]:
        if dims.has("osier-divide-ahead") and module is model.ahead.layer:
            continue  # plant: osier-divide-ahead
        module.set_gradient_divide_factor(1.0)
    known = {id(p) for p in own}
    for parameter in model.parameters():
        if id(parameter) not in known:
            parameter.cut_over = shard
            if dims.has("osier-norm-copies"):
                parameter.cut_over = batch  # plant: osier-norm-copies
    if dims.has("osier-expert-copies"):
        return model, lambda: None  # plant: osier-expert-copies
    return model, GradSync(own, copies, dims)
