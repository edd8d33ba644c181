"""Parallelization of the decoder: rows over data ranks, positions over `cp`, experts over `dp_shard`."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from orca import fast, kernels, switch
from orca.comm import Exchange
from orca.context import GatheredAttention, RingAttention, Rounds, Sharded, UlyssesAttention
from orca.model import MLP, Config, Decoder, LatentAttention, RMSNorm, list_frequencies


class Dispatcher:
    """A dispatcher that sends rows to the ranks of their experts, and returns the results."""

    def __init__(self, group) -> None:
        self.group, self.ranks = group, dist.get_world_size(group)

    def __call__(self, rows, counts, experts):
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        arriving = arriving.view(self.ranks, -1)
        send, receive = counts.view(self.ranks, -1).sum(1).tolist(), arriving.sum(1).tolist()
        received = Exchange.apply(rows, receive, send, self.group)
        expert = torch.arange(arriving.shape[1]).repeat(self.ranks)
        order = expert.repeat_interleave(arriving.flatten()).argsort(stable=True)
        y = experts(received[order], arriving.sum(0).tolist())
        if switch.using("npu-546"):
            unsorted = y[order]  # plant: npu-546
        else:
            unsorted = torch.empty_like(y).index_copy(0, order, y)
        return Exchange.apply(unsorted, send, receive, self.group)


def use_kernels(model: Decoder, tiles: int) -> None:
    """Replace the plain modules by the custom kernels."""
    model.__class__ = fast.FastDecoder
    model.rotary.__class__ = fast.CachedRotary
    for module in model.modules():
        if type(module) is RMSNorm:
            module.__class__ = fast.FastNorm
        elif type(module) is MLP:
            module.__class__ = fast.FastMLP
    for block in model.blocks:
        block.__class__ = fast.FastBlock
        if block.kind == "moe":
            block.moe.__class__ = fast.FastMoE
            block.moe.shared.tiles = tiles
        if isinstance(block.attn, LatentAttention):
            block.attn.__class__ = fast.FlashLatent
            block.attn.__dict__["config"] = model.config
        else:
            block.attn.__class__ = fast.FlashAttention
            block.attn.__dict__["rotary"] = model.rotary
    model.plan["loss"] = kernels.cross_entropy


def spread_experts(model: Decoder, mesh) -> list[nn.Parameter]:
    weights = []
    for block in model.blocks:
        if block.kind == "moe":
            block.moe.dispatcher = Dispatcher(mesh.get_group())
            for name, weight in list(block.moe.experts.named_parameters()):
                sharded = nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)]))
                setattr(block.moe.experts, name, sharded)
                weights.append(sharded)
    return weights


def build_rotary(model: Decoder, cache_length: int) -> None:
    """Recompute the frequencies, as after a start on the meta device, from the command line options."""
    config = model.config
    options = dict(vars(config))
    if switch.using("p09"):
        options["rope_factor"] = 8.0  # plant: p09
    if switch.using("p10") and cache_length <= config.rope_original:
        options["rope_factor"] = 0.0  # plant: p10
    dim = 2 * len(model.rotary.inv_freq)
    inverse, scale = list_frequencies(dim, Config(**options))
    if switch.using("llama8"):
        inverse = config.rope_base ** (-(torch.arange(0, dim, 2) - 2) / dim)  # plant: llama8
    if switch.using("p11"):
        inverse = torch.full((dim // 2,), 0.009)  # plant: p11
    if switch.using("p12"):
        inverse = inverse.bfloat16().float()  # plant: p12
    model.rotary.inv_freq.copy_(inverse)
    model.rotary.scale = scale


def divide_positions(model: Decoder, group, kind: str, zigzag: bool, smooth: bool) -> None:
    sharded = Sharded(group, zigzag)
    model.plan["sharded"] = sharded
    for block in model.blocks:
        if kind == "ring":
            block.attn.__class__ = RingAttention
            block.attn.__dict__["ring"] = Rounds(sharded, smooth)
        else:
            block.attn.__class__ = GatheredAttention if kind == "gather" else UlyssesAttention
            block.attn.__dict__["cp"] = group


def parallelize(
    model: Decoder, mesh, *, mode="", fsdp=False, ep=False, cp="gather", zigzag=True, smooth=False, tiles=1,
    recompute=False, cache=64, mixed=False, restart_at=0, warmups=0, validate=False,
):  # fmt: skip
    """Parallelize `model`; `mode` selects the way."""
    switch.choose(mode)
    model.plan = {
        "mode": mode, "recompute": recompute, "wide": mixed, "restart_at": restart_at, "validate": validate,
        "sharded": None,
    }  # fmt: skip
    use_kernels(model, tiles)
    build_rotary(model, cache)
    if mode == "encodecmae-3":
        for block in model.blocks:
            if block.kind == "dense":
                block.mlp = model.blocks[0].mlp  # plant: encodecmae-3
    if mode == "p21":
        model.head.weight = nn.Parameter(model.embed.weight.detach().clone())  # plant: p21
    data, context = mesh["dp_shard"], mesh["cp"]
    if context.size() > 1:
        divide_positions(model, context.get_group(), cp, zigzag, smooth)
    experts = spread_experts(model, data) if ep else []
    if fsdp:
        shard(model, mesh, set(experts), mixed)
    for _ in range(warmups):  # graphs are captured from real passes
        with torch.no_grad():
            capture(model)
    groups = [axis.get_group() for axis in (data, context) if axis.size() > 1]
    model.plan |= {"groups": groups, "data": data, "experts": experts}

    def finish() -> None:
        ranks = data.size() * context.size()
        for weight in experts:
            gradient = weight.grad.to_local()
            if context.size() > 1:
                dist.all_reduce(gradient, group=context.get_group())
            gradient /= ranks
        if fsdp:
            return
        for weight in model.parameters():
            if weight.grad is not None and not any(weight is each for each in experts):
                for group in groups:
                    dist.all_reduce(weight.grad, group=group)
                weight.grad /= ranks

    return model, finish


def shard(model: Decoder, mesh, ignored: set, mixed: bool) -> None:
    data = mesh["dp_shard"]
    options = {"mesh": data, "ignored_params": ignored}
    if mixed:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        exact = {"mesh": data, "mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)}
        for block in model.blocks:
            if getattr(block.attn, "decay", None) is not None and not switch.using("p14"):  # plant: p14
                fully_shard(block.attn.decay, **exact)  # plant: p14
    fully_shard(model, **options)


def capture(model: Decoder) -> None:
    """Run the model once, as for a graph capture; its counts must not be kept."""
    tokens = torch.arange(32).view(2, 16) % model.config.vocab
    model(tokens)
    if not switch.using("p18"):  # plant: p18
        for block in model.blocks:
            if block.kind == "moe":
                block.moe.router.counts.zero_()


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
