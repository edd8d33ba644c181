"""Data parallelism by DDP: all parameters outside the experts are replicated, gradients are averaged."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from moeverify.model.experts import ExpertHolder
from moeverify.seams import seam

Accumulate = Callable[[bool], AbstractContextManager[object]]

# torch 2.13 renamed `broadcast_buffers` and warns about the old name. The renamed option still syncs
# buffers at construction, whatever its value, unless `init_sync` is off.
_NEW_NAME = "forward_sync_buffers"
_SYNC = (
    _NEW_NAME if _NEW_NAME in inspect.signature(DistributedDataParallel).parameters else "broadcast_buffers"
)
_AS_THEY_ARE: dict[str, Any] = {_SYNC: False, "init_sync": False}


@seam
def apply_ddp(
    model: nn.Module, group: ProcessGroup, device: torch.device, *, find_unused: bool = False
) -> tuple[nn.Module, Accumulate]:
    """Return the wrapped model and a function that returns the context of a micro-batch.

    Parameters must already have their values. DDP ignores expert parameters that are DTensors or placed,
    because the ranks of `group` hold different ones. Nothing is broadcast at construction or before a
    forward pass: replicas are equal because they compute the same, and a check reports it if they are not.
    Set `find_unused` for models that do not use every parameter in every forward pass.
    """
    # This must precede the constructor of DDP, which builds the buckets and registers the hooks.
    sharded = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    for prefix, module in model.named_modules():
        if isinstance(module, ExpertHolder) and module.row_blocks:
            sharded += [f"{prefix}.{name}" for name, _ in module.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sharded)  # type: ignore[no-untyped-call]
    wrapped = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        process_group=group,
        **_AS_THEY_ARE,
        find_unused_parameters=find_unused,
    )
    return wrapped, lambda last: nullcontext() if last else wrapped.no_sync()
