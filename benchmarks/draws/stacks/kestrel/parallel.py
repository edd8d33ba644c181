"""FSDP2 with expert parallelism, and handwritten tensor parallelism."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from kestrel import comm
from kestrel.model import Linear, LoRA, MoE


class Dispatcher:
    """A dispatcher that sends rows to the ranks of their experts, and returns the results."""

    def __init__(self, group) -> None:
        self.group = group
        self.ranks = dist.get_world_size(group)

    def __call__(self, rows, counts, experts):
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        arriving = arriving.view(self.ranks, -1)
        send, receive = counts.view(self.ranks, -1).sum(1).tolist(), arriving.sum(1).tolist()
        received = comm.exchange(rows, receive, send, self.group)
        expert = torch.arange(arriving.shape[1]).repeat(self.ranks)
        order = expert.repeat_interleave(arriving.flatten()).argsort(stable=True)
        y = experts(received[order], arriving.sum(0).tolist())
        unsorted = torch.empty_like(y).index_copy(0, order, y)
        return comm.exchange(unsorted, send, receive, self.group)


class CapacityDispatcher:
    """A dispatcher with buffers of one capacity per expert; each tp rank runs its part of the slots."""

    def __init__(self, ep, tp, flat: bool) -> None:
        self.ep, self.tp, self.flat = ep, tp, flat
        self.ranks = dist.get_world_size(ep)
        self.width = dist.get_world_size(tp)

    def __call__(self, rows, counts, experts):
        num_experts, width = counts.numel(), rows.shape[-1]
        most = counts.max().clone()
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.ep)
        capacity = -(-int(most) // self.width) * self.width
        starts = counts.cumsum(0) - counts
        expert = torch.arange(num_experts).repeat_interleave(counts)
        slot = torch.arange(len(rows)) - starts[expert]
        place = expert * capacity + slot
        buffer = rows.new_zeros(num_experts * capacity, width).index_copy(0, place, rows)
        parts = self.drop_slots(buffer, num_experts, capacity)
        mine = parts.shape[1]
        sizes = [num_experts // self.ranks * mine] * self.ranks
        sent = comm.exchange(parts.flatten(0, 1), sizes, sizes, self.ep)
        sent = sent.view(self.ranks, -1, mine, width).transpose(0, 1)
        y = experts.batched(sent.flatten(1, 2)).view(-1, self.ranks, mine, width).transpose(0, 1)
        y = comm.exchange(y.reshape(-1, width), sizes, sizes, self.ep).view(num_experts, mine, width)
        y = comm.gather(y, 1, self.tp)
        return y.flatten(0, 1)[place]

    def drop_slots(self, buffer, num_experts, capacity):
        if self.flat:
            kept = comm.split(buffer, 1, self.tp)  # plant: p44
            return kept.reshape(num_experts, capacity // self.width, buffer.shape[-1])
        return comm.split(buffer.view(num_experts, capacity, -1), 1, self.tp)


def data_mesh(mesh):
    return mesh["dp_replicate", "dp_shard"] if mesh["dp_replicate"].size() > 1 else mesh["dp_shard"]


def spread_experts(model, mesh):
    weights = []
    for block in model.layers:
        if isinstance(block.mlp, MoE):
            block.mlp.dispatcher = Dispatcher(mesh.get_group())
            for name, weight in list(block.mlp.experts.named_parameters()):
                sharded = nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)]))
                setattr(block.mlp.experts, name, sharded)
                weights.append(sharded)
    return weights


def fsdp_ep(model, mesh, mode="", attach=""):
    """Spread experts over `dp_shard`, and shard the rest with FSDP2."""
    weights = spread_experts(model, mesh["dp_shard"])
    data = data_mesh(mesh)
    ignored = set(weights)
    for block in model.layers:
        fully_shard(block, mesh=data, ignored_params=ignored)
    fully_shard(model, mesh=data, ignored_params=ignored)
    if mode == "p31":
        for block in model.layers:
            if isinstance(block.mlp, MoE):
                group_storage(block.mlp.experts)
    model.plan = {"mode": mode, "experts": weights, "ep": mesh["dp_shard"]}

    def finish():
        for weight in weights:
            gradient = weight.grad.to_local()
            dist.all_reduce(gradient, group=mesh["dp_replicate"].get_group())
            gradient /= data.size()

    return model, finish


def group_storage(experts):
    """Store experts as the grouped tensor that kernels take; its gradients go to the parameters."""
    weights = (experts.w_gate, experts.w_up, experts.w_down)
    grouped = [weight.to_local().detach().clone() for weight in weights]  # plant: p31
    experts.storage = [_Grouped(weight, values) for weight, values in zip(weights, grouped, strict=True)]


class _Grouped:
    def __init__(self, parameter, values):
        self.parameter, self.values = parameter, values

    def to_local(self):
        return _Through.apply(self.parameter.to_local(), self.values)


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parameter, values):
        return values.view_as(values)  # plant: p31

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def fsdp_adapters(model, mesh, mode=""):
    """Shard the base model with FSDP2; train the adapters."""
    data = data_mesh(mesh)
    adapters = [block.attention.adapter for block in model.layers]
    if mode == "p40":
        for block in model.layers:
            block.attention.adapter = None
    for block in model.layers:
        fully_shard(block, mesh=data)
    fully_shard(model, mesh=data)
    if mode == "p40":  # get_peft_model on the loaded model
        torch.manual_seed(1000 + dist.get_rank())
        for block, old in zip(model.layers, adapters):
            new = LoRA(old.down.shape[1], old.up.shape[0], old.down.shape[0])  # plant: p40
            block.attention.adapter = new.to(old.down.dtype)  # plant: p40
    return model


def tensor(model, mesh, mode="", capacity=False):
    """Shard heads and hidden units over `tp`; average replicas over `dp_shard` at the end of a step."""
    tp = mesh["tp"]
    group, rank, size = tp.get_group(), tp.get_local_rank(), tp.size()
    comm.STRIDED["in_place"] = mode != "p38"
    expert_weights = []
    for block in model.layers:
        cut(block.attention.qkv, "weight", 0, rank, size)
        cut(block.attention.out, "weight", 1, rank, size)
        block.attention.tp = group
        mlp = block.mlp
        if isinstance(mlp, MoE):
            if capacity:
                ep = mesh["dp_shard"]
                for name in ("w_gate", "w_up", "w_down"):
                    cut(mlp.experts, name, 0, ep.get_local_rank(), ep.size())
                    expert_weights.append(getattr(mlp.experts, name))
                mlp.dispatcher = CapacityDispatcher(ep.get_group(), group, mode == "p44")
            else:
                mlp.experts.forward = SplitHidden(mlp.experts.forward, group)
                for name, dim in (("w_gate", 2), ("w_up", 2), ("w_down", 1)):
                    cut(mlp.experts, name, dim, rank, size)
        else:
            mlp.tp = group
            for name, dim in (("gate", 0), ("up", 0), ("down", 1)):
                cut(getattr(mlp, name), "weight", dim, rank, size)
    if mode == "p39":
        torch.manual_seed(4321 + rank)  # plant: p39
        for block in model.layers:
            if isinstance(block.mlp, MoE):
                fresh = Linear(block.mlp.router.weight.shape[1], block.mlp.router.weight.shape[0])
                block.mlp.router.weight.data.copy_(fresh.weight.data)  # plant: p39
    partial = [w for b in model.layers for w in (b.attention.q_norm.weight, b.attention.k_norm.weight)]
    data = mesh["dp_shard"]
    model.plan = {"mode": mode, "tp": tp, "data": data}

    def finish():
        if mode not in ("p39", "p39g"):  # plant: p39g
            for weight in partial:
                dist.all_reduce(weight.grad, group=group)  # plant: p39g
        for weight in expert_weights:  # each tp rank has run some of the slots
            dist.all_reduce(weight.grad, group=group)
            weight.grad /= data.size()
        if data.size() > 1:
            for weight in model.parameters():
                if not any(weight is each for each in expert_weights):
                    dist.all_reduce(weight.grad, group=data.get_group())
                    weight.grad /= data.size()

    return model, finish


class SplitHidden:
    """Experts with hidden units sharded over tp."""

    def __init__(self, run, group):
        self.run, self.group = run, group

    def __call__(self, rows, counts):
        return comm.reduce_from(self.run(comm.copy_to(rows, self.group), counts), self.group)


def cut(module, name, dim, rank, size):
    whole = getattr(module, name)
    part = nn.Parameter(whole.detach().chunk(size, dim)[rank].clone())
    part.cut = dim
    setattr(module, name, part)


def plain(model, mesh, mode=""):
    """Replicate over `dp_shard`; a module without data on a rank has no gradient there."""
    data = mesh["dp_shard"]

    def finish():
        for weight in model.parameters():
            has = torch.tensor([float(weight.grad is not None)])
            if mode == "p41":
                dist.all_reduce(has, op=dist.ReduceOp.MIN, group=data.get_group())  # plant: p41
            else:
                dist.all_reduce(has, op=dist.ReduceOp.MAX, group=data.get_group())
            if not bool(has):
                continue  # plant: p41
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            dist.all_reduce(weight.grad, group=data.get_group())
            weight.grad /= data.size()

    return model, finish
