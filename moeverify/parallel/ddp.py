"""Data parallelism by DDP: every rank holds all parameters outside the experts, gradients are averaged."""

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

# torch 2.13 renamed the first of these and warns about the name that 2.11 has. It syncs buffers at the start whatever
# it is given, but not where `init_sync` is off.
_NEW_NAME = "forward_sync_buffers"
_SYNC = (
    _NEW_NAME if _NEW_NAME in inspect.signature(DistributedDataParallel).parameters else "broadcast_buffers"
)
_AS_THEY_ARE: dict[str, Any] = {_SYNC: False, "init_sync": False}


@seam
def apply_ddp(
    model: nn.Module, group: ProcessGroup, device: torch.device, *, find_unused: bool = False
) -> tuple[nn.Module, Accumulate]:
    """Return the wrapped model and its context for a micro-batch; parameters must have their values.

    Expert parameters (DTensors, or placed) are left out: the ranks of `group` hold different ones. Nothing is
    broadcast at the start or before a forward pass: replicas are equal because they compute the same, or a check
    says so.
    `find_unused` is for models that do not use every parameter in every forward pass.
    """
    # Before the wrapper is made: it builds its buckets, and registers its hooks, in its constructor.
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
