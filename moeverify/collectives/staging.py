"""Messages between ranks that share a GPU: gloo sends none from there, so they go through the CPU.

torch's gloo copies tensors of GPUs by itself in every collective that the layouts use, but hands the address of a
message's tensor to a socket as it is (torch 2.11 to 2.13, ProcessGroupGloo.cpp, send and recv).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PythonCallbackWork

_CPU = torch.device("cpu")


def stage_messages(device_type: str = "CUDA") -> torch.library.Library:
    """Let `send` and `recv` of tensors on these devices go through the CPU, as long as the library that it returns.

    For groups of gloo alone: NCCL sends from a GPU by itself.
    """
    library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    for name, kernel in (("send", send_staged), ("recv_", receive_staged)):
        library.impl(name, kernel, device_type, allow_override=True)  # type: ignore[no-untyped-call]
    return library


def send_staged(tensors: list[Tensor], group: Any, destination: int, tag: int) -> Any:
    """Send a copy of the one tensor; Collective: the group's rank `destination` receives."""
    (tensor,) = tensors
    return _cpu_backend(group).send([tensor.to(_CPU, copy=True).contiguous()], destination, tag).boxed()


def receive_staged(tensors: list[Tensor], group: Any, source: int, tag: int) -> Any:
    """Receive into a copy, and copy it into the one tensor when someone waits for the work that is returned."""
    (tensor,) = tensors
    arriving = torch.empty(tensor.shape, dtype=tensor.dtype)
    work = _cpu_backend(group).recv([arriving], source, tag)

    def finish(timeout: timedelta) -> bool:
        # A wait without a limit of its own has zero for it, or -1 milliseconds: then the group's counts.
        done = work.wait(timeout) if timeout > timedelta(0) else work.wait()
        tensor.copy_(arriving)
        return bool(done)

    return PythonCallbackWork(finish).boxed()


def _cpu_backend(group: Any) -> Any:
    unboxed = group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)
    return unboxed._get_backend(_CPU)
