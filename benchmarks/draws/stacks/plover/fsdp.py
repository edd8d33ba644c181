"""FSDP2 for the matrices, and own reductions for small parameters, which stay whole on all ranks."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from plover.moe import MoE
from plover.state import Parallel, attach, axis_of


def is_small(parameter):
    return parameter.dim() == 1


def sharded(model, mesh, *, bug="", every_block=True):
    """Shard over `dp_shard`, and replicate over `dp_replicate` where it is there."""
    names = [name for name in ("dp_replicate", "dp_shard") if mesh[name].size() > 1]
    data = axis_of(mesh, *names)
    ps = Parallel(bug=bug, data=data, shard=axis_of(mesh, "dp_shard"))
    attach(model, ps)
    small = [parameter for parameter in model.parameters() if is_small(parameter)]
    options = {"mesh": mesh[tuple(names)], "ignored_params": set(small)}
    if every_block:
        for block in model.blocks:
            if isinstance(block.mlp, MoE):
                shard_experts(block.mlp.experts, options, ps)
            fully_shard(block, **options)
    fully_shard(model, **options)

    def finish():
        """Average the gradients that FSDP leaves alone."""
        axis = ps.data
        if ps.using("plover-small-axis"):
            axis = ps.shard  # plant: plover-small-axis
        flat = torch.cat([parameter.grad.flatten() for parameter in small])
        dist.all_reduce(flat, group=axis.group)
        flat /= axis.size
        for parameter, part in zip(small, flat.split([p.numel() for p in small])):
            parameter.grad.copy_(part.view_as(parameter))

    return model, finish


def shard_experts(experts, options, ps):
    fully_shard(experts, **options)
    if ps.using("plover-expert-divisor"):
        experts.set_gradient_divide_factor(1.0)  # plant: plover-expert-divisor
