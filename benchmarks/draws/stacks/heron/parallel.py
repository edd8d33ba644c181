"""Parallelization of the decoder: tensors over `tp`, experts and shards over data ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from heron import switch
from heron.init import init_shards
from heron.model import Decoder
from heron.optim import HeronAdamW, list_groups
from heron.reduce import Reducer
from heron.routing import Dispatcher, FusedRouter
from heron.switch import using
from heron.tensor import divide_tensors


def begin(model: Decoder, mode: str) -> None:
    switch.choose(mode)
    model.plan = {"mode": mode}
    for layer in model.layers:
        if layer.kind == "moe":
            layer.moe.router.__class__ = FusedRouter


def tensor(model: Decoder, mesh, *, mode="", row="torch", vocab="", sequence=False, fsdp=False, again=False):
    """Apply tensor parallelism, and replicas or FSDP2 over `dp_shard`."""
    begin(model, mode)
    tp, data = mesh["tp"], mesh["dp_shard"]
    divide_tensors(model, tp, row=row, vocab=vocab, sequence=sequence)
    if fsdp:
        for layer in model.layers:
            fully_shard(layer, mesh=data)
        fully_shard(model, mesh=data)
    if again:
        init_shards(model, mesh)
    model.plan |= {"tp": tp, "groups": [data.get_group()], "data": data}
    return model


def spread_experts(model: Decoder, mesh) -> list[nn.Parameter]:
    weights = []
    for layer in model.layers:
        if layer.kind == "moe":
            layer.moe.dispatcher = Dispatcher(mesh.get_group())
            for name, weight in list(layer.moe.experts.named_parameters()):
                sharded = nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)]))
                setattr(layer.moe.experts, name, sharded)
                weights.append(sharded)
    return weights


def sharded(model: Decoder, mesh, *, mode="", ep=True, again=False, ours=False, lr=0.01, decay=0.1):
    """Apply FSDP2 or HSDP, with experts over `dp_shard`; `ours` uses the custom AdamW."""
    begin(model, mode)
    replicate, shard = mesh["dp_replicate"], mesh["dp_shard"]
    data = mesh["dp_replicate", "dp_shard"] if replicate.size() > 1 else shard
    ranks = data.size()
    experts = spread_experts(model, shard) if ep else []
    over = data
    if using("a13"):
        over = shard  # plant: a13
    ignored = set(experts)
    if using("i04"):
        ignored |= {w for name, w in model.named_parameters() if "router" in name}  # plant: i04
    for layer in model.layers:
        fully_shard(layer, mesh=over, ignored_params=ignored)
    fully_shard(model, mesh=over, ignored_params=ignored)
    if again:
        init_shards(model, mesh)
    groups = [axis.get_group() for axis in (replicate, shard) if axis.size() > 1]
    for layer in model.layers:
        if layer.kind == "moe":
            layer.moe.router.__dict__["data"] = shard.get_group()
    model.plan |= {"experts": experts, "data": data, "shard": shard, "groups": groups, "replicate": replicate}

    def finish() -> None:
        for weight in experts:
            gradient = weight.grad.to_local()
            if replicate.size() > 1:
                dist.all_reduce(gradient, group=replicate.get_group())
            if using("megablocks-160"):
                dist.all_reduce(gradient, group=shard.get_group())  # plant: megablocks-160
            if using("a04"):
                gradient /= ranks * shard.size()  # plant: a04
            elif not using("a14"):  # plant: a14
                gradient /= ranks  # plant: a14

    if not ours:
        return model, finish
    from moeverify.train.engine import PreparedEngine
    from moeverify.train.parallelize_custom import ParallelizedCustomModel

    optimizer = HeronAdamW(list_groups(model, decay), lr=lr)
    return ParallelizedCustomModel(model, finalize=finish, engine=PreparedEngine(optimizer))


def expert_fsdp(model: Decoder, mesh, *, mode=""):
    """Spread experts over pairs of ranks, with FSDP2 over the pairs; shard the rest over all ranks."""
    begin(model, mode)
    data = mesh["dp_shard"]
    both = init_device_mesh("cpu", (data.size() // 2, 2), mesh_dim_names=("efsdp", "ep"))
    spread_experts(model, both["ep"])
    for layer in model.layers:
        if layer.kind == "moe":
            fully_shard(layer.moe.experts, mesh=both["efsdp"])
            if using("a05"):
                continue  # plant: a05
            layer.moe.experts.set_gradient_divide_factor(data.size())  # plant: a05
    for layer in model.layers:
        fully_shard(layer, mesh=data)
    fully_shard(model, mesh=data)
    return model


def replicas(model: Decoder, mesh, *, mode="", ours=False, lr=0.01, decay=0.1):
    """Replicate the model; a custom reducer averages gradients."""
    from moeverify.train.engine import PreparedEngine
    from moeverify.train.parallelize_custom import ParallelizedCustomModel

    begin(model, mode)
    group = mesh["dp_shard"].get_group()
    reducer = Reducer(model.parameters(), group)
    model.plan |= {"groups": [group], "data": mesh["dp_shard"], "reducer": reducer}
    engine = {}
    if ours:
        engine["engine"] = PreparedEngine(HeronAdamW(list_groups(model, decay), lr=lr))
    return ParallelizedCustomModel(model, finalize=reducer.finish, accumulate=reducer.accumulate, **engine)


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
