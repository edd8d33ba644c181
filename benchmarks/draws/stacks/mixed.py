"""Mixed precision around a stack that has none: float32 parameters, and passes in bfloat16."""

import importlib
from unittest import mock

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from moeverify.model.mixed_precision import narrow_model


def widen_partial_sums():
    """Let FSDP2 widen gradients before it sums them over tensor parallelism (pytorch #190626, in torch 2.13).

    Without it, parameters that are replicated over `tp` are a mismatch of `precision` in every stack.
    """
    take = FSDPParam._get_grad_inner_tensor

    def take_wide(parameter, gradient):
        return take(parameter, gradient.to(parameter.reduce_dtype or gradient.dtype))

    FSDPParam._get_grad_inner_tensor = take_wide


widen_partial_sums()


def parallelize(model, mesh, *, narrows, **arguments):
    """Parallelize by the function `narrows`, whose FSDP2 gets a policy; narrow the parameters that it leaves."""
    path, _, name = narrows.partition(":")
    module = importlib.import_module(path)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharded = set()

    def shard(part, **options):
        before = set(part.parameters())
        done = fully_shard(part, **{"mp_policy": policy, **options})
        sharded.update(set(part.parameters()) - before)
        return done

    with mock.patch.object(module, "fully_shard", shard, create=True):
        returned = getattr(module, name)(model, mesh, **arguments)
    parallel = returned[0] if isinstance(returned, tuple) else getattr(returned, "model", returned)
    if policy.param_dtype is not None:  # None in a wider run
        narrow_model(parallel, policy.param_dtype, sharded)
    return returned
