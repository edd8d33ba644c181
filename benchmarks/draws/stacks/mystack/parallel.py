"""Parallelization of the decoder: experts over data or tensor ranks, attention over tensor ranks, FSDP2."""

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from mystack import weights
from mystack.dispatch import Exchange, Masked, Sliced
from mystack.fused import AbsorbedAttention, FusedRouter
from mystack.model import Attention, Decoder, LatentAttention


def _place(experts: nn.Module, mesh, placements: dict) -> list[nn.Parameter]:
    made = []
    for name, placement in placements.items():
        weight = nn.Parameter(distribute_tensor(getattr(experts, name).detach(), mesh, [placement]))
        setattr(experts, name, weight)
        made.append(weight)
    return made


def parallelize(model: Decoder, mesh, *, experts="exchange", fsdp=True, **options):
    """Parallelize `model`; `experts` selects the dispatch of tokens."""
    model.options = options
    published = None
    if options.get("checkpoint"):
        published = weights.publish(model.state_dict())
        weights.forget(model)
    tp, dp = mesh["tp"], mesh["dp_shard"]
    replicate = mesh["dp_replicate"]
    ours = []
    for layer in model.layers:
        moe = layer.moe
        moe.router.fused = bool(options.get("fused_router"))
        layer.attn.backend = options.get("backend", "plain")
        if options.get("kernels") == "fused":
            moe.router.__class__ = FusedRouter
            if isinstance(layer.attn, LatentAttention):
                layer.attn.__class__ = AbsorbedAttention
        if tp.size() > 1 and isinstance(layer.attn, Attention):
            plan = {name: ColwiseParallel() for name in ("q", "k", "v")} | {"o": RowwiseParallel()}
            parallelize_module(layer.attn, tp, plan)
        every = {n: Shard(0) for n in ("w_gate", "w_up", "w_down", "b_down")}
        if experts == "exchange":
            ours += _place(moe.experts, dp, every)
            moe.dispatcher = Exchange(dp)
            moe.experts.grouped = options
            moe.experts.first = dp.get_local_rank() * (moe.experts.num_experts // dp.size())
        elif experts == "masked":
            _place(moe.experts, tp, every)
            moe.experts.grouped = options
            moe.dispatcher = Masked(tp, moe.experts.num_experts, options)
            moe.experts.first = moe.dispatcher.first
        elif experts == "sliced":
            _place(moe.experts, tp, {"w_gate": Shard(2), "w_up": Shard(2), "w_down": Shard(1)})
            moe.experts.b_down.register_hook(lambda g, group=tp.get_group(): _summed(g, group))
            moe.dispatcher = Sliced(tp, options)
    if published is not None:
        state = weights.adopt(
            published, len(model.layers), model.layers[0].moe.experts.w_down.shape[1], options
        )
        weights.read(model, state, options)
    if fsdp and dp.size() > 1:
        whole = mesh["dp_replicate", "dp_shard"] if replicate.size() > 1 else dp
        fully_shard(model, mesh=whole, ignored_params=set(ours))

    def finish() -> None:
        if experts == "exchange":
            for weight in ours:
                gradient = weight.grad.to_local()
                if replicate.size() > 1:
                    dist.all_reduce(gradient, group=replicate.get_group())
                gradient /= dp.size() * replicate.size()
        if replicate.size() > 1 and dp.size() == 1:
            for weight in model.parameters():
                gradient = weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
                dist.all_reduce(gradient, group=replicate.get_group())
                gradient /= replicate.size()

    return model, finish


def _summed(gradient, group):
    gradient = gradient.clone()
    dist.all_reduce(gradient, group=group)
    return gradient
