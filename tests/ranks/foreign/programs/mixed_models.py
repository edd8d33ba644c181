"""A small mixture of experts, and functions that parallelize it in mixed precision, both right and wrong."""

from functools import partial

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import create_selective_checkpoint_contexts

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
NARROW = MixedPrecisionPolicy(param_dtype=torch.bfloat16)  # reduces in the compute dtype


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return (self.weight.to(wide.dtype) * scaled).to(x.dtype)


class Experts(nn.Module):
    """Two experts in one list, weighted by a soft router; they accept inputs of any dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(16, 16) / 4) for _ in range(2))

    def forward(self, x: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        outputs = [(x.to(weight.dtype) @ weight).to(x.dtype) for weight in self.weights]
        return torch.stack(
            [share * out for share, out in zip(shares.split(1, dim=-1), outputs, strict=True)]
        ).sum(0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.router = nn.Linear(16, 2)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = self.norm(x)
        shares = self.router(inside.to(self.router.weight.dtype)).softmax(-1).to(inside.dtype)
        return x + self.experts(inside, shares)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 32, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def shard(model, mesh, policy, others=()):
    """Wrap every block with FSDP2, after wrapping each of `others`: (module, policy)."""
    for module, own in others:
        fully_shard(module, mesh=mesh["dp_shard"], mp_policy=own)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp_shard"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp_shard"], mp_policy=policy)
    return model


def right(model, mesh):
    return shard(model, mesh, POLICY)


def wide_norms(model, mesh):
    """Keep norms and routers in float32, as some recipes do on purpose."""
    wide = MixedPrecisionPolicy()
    return shard(
        model, mesh, POLICY, [(part, wide) for each in model.layers for part in (each.norm, each.router)]
    )


def autocast(model, mesh):
    """Gather weights in float32, and let autocast narrow them for each product."""
    shard(model, mesh, MixedPrecisionPolicy())
    model.embed.register_forward_hook(lambda module, inputs, output: output.bfloat16())
    context = torch.autocast(mesh.device_type, torch.bfloat16)
    model.register_forward_pre_hook(lambda module, inputs: context.__enter__() and None)
    model.register_forward_hook(lambda module, inputs, output: context.__exit__(None, None, None) or None)
    return model


def compiled(model, mesh):
    kept = [torch.ops.aten.mm.default]
    compile_blocks(model, context_fn=partial(create_selective_checkpoint_contexts, kept))
    return shard(model, mesh, POLICY)


def compiled_without(model, mesh):
    compile_blocks(model)
    return shard(model, mesh, MixedPrecisionPolicy())


def compile_blocks(model, **how):
    """Wrap every block for recomputation before it is compiled, as torchtitan does."""
    torch._dynamo.config.recompile_limit = 3  # of all layers of one case together
    for name, layer in model.layers.named_children():
        model.layers.register_module(name, checkpoint_wrapper(layer, **how))
    for layer in model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)


def forgotten(model, mesh):
    return shard(model, mesh, MixedPrecisionPolicy())


def experts_without(model, mesh):
    return shard(model, mesh, POLICY, [(model.layers[1].experts, MixedPrecisionPolicy())])


def narrow_reduction(model, mesh):
    return shard(model, mesh, NARROW)


def narrow_reduction_of_one(model, mesh):
    return shard(model, mesh, POLICY, [(model.layers[0].experts, NARROW)])


def narrow_storage(model, mesh):
    """Keep everything in bfloat16, including optimizer state."""
    return shard(model.to(torch.bfloat16), mesh, MixedPrecisionPolicy())


class Sequence(nn.Module):
    """A norm between two products that tensor parallelism shards."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(32, 16, bias=False)
        self.head = nn.Linear(16, 32, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.head(x + self.down(nn.functional.silu(self.up(self.norm(x)))))


def divide_sequence(model, mesh):
    """Apply tensor parallelism with sequence parallelism around the norm, and FSDP2 over the rest."""
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp_shard"], mp_policy=POLICY)
    return model
