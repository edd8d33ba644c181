"""Collectives of ranks that share a GPU which gloo cannot begin there: their tensors go through the CPU.

torch's gloo copies tensors of GPUs by itself in most collectives. It hands the address of a message's tensor to a
socket as it is, and reads the tensors of the coalesced collectives, which DTensor issues, as if the host could: the
process ends in a segmentation fault (torch 2.11 to 2.13, ProcessGroupGloo.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PythonCallbackWork

_CPU = torch.device("cpu")
# Straight to gloo: who listens to the collectives of this process has heard of the one that is staged.
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def stage_collectives(device_type: str = "CUDA") -> torch.library.Library:
    """Let messages and coalesced collectives of tensors on these devices go through the CPU.

    For groups of gloo alone, as long as the library that it returns: NCCL reads a GPU's memory by itself.
    """
    library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    for name, kernel in _KERNELS.items():
        library.impl(name, kernel, device_type, allow_override=True)  # type: ignore[no-untyped-call]
    return library


def send_staged(tensors: Sequence[Tensor], group: Any, destination: int, tag: int) -> Any:
    """Send a copy of the one tensor; Collective: the group's rank `destination` receives."""
    (tensor,) = tensors
    return _cpu_backend(group).send([_copy(tensor)], destination, tag).boxed()


def receive_staged(tensors: Sequence[Tensor], group: Any, source: int, tag: int) -> Any:
    """Receive into a copy, and copy it into the one tensor when someone waits for the work that is returned."""
    (tensor,) = tensors
    arriving = _make_room(tensor)
    return _deliver([_cpu_backend(group).recv([arriving], source, tag)], [arriving], [tensor])


def gather_staged(outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: Any, *options: Any) -> Any:
    """Gather each input of (n, ...) into the output of (ranks * n, ...) at its place; Collective: all ranks."""
    arriving = [_make_room(tensor) for tensor in outputs]
    gather = torch.ops.c10d._allgather_base_.default.redispatch
    works = [
        gather(_KEYS, whole, _copy(part), group, *options)[1]
        for whole, part in zip(arriving, inputs, strict=True)
    ]
    return _deliver(map(dist.Work.unbox, works), arriving, outputs)


def scatter_sums_staged(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: Any, operation: Any, *options: Any
) -> Any:
    """Reduce each input of (ranks * n, ...) and scatter it to the output of (n, ...); Collective: all ranks."""
    arriving = [_make_room(tensor) for tensor in outputs]
    scatter = torch.ops.c10d._reduce_scatter_base_.default.redispatch
    works = [
        scatter(_KEYS, part, _copy(whole), group, operation, *options)[1]
        for part, whole in zip(arriving, inputs, strict=True)
    ]
    return _deliver(map(dist.Work.unbox, works), arriving, outputs)


def reduce_staged(tensors: Sequence[Tensor], group: Any, operation: Any, *options: Any) -> Any:
    """Reduce each of the tensors in place; Collective: all ranks of the group."""
    arriving = [_copy(tensor) for tensor in tensors]
    reduce = torch.ops.c10d.allreduce_.default.redispatch
    works = [reduce(_KEYS, [tensor], group, operation, None, *options)[1] for tensor in arriving]
    return _deliver(map(dist.Work.unbox, works), arriving, tensors)


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU that the sender may not change any more, its elements in order."""
    return tensor.detach().to(_CPU, copy=True).contiguous()


def _make_room(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _deliver(works: Iterable[Any], arriving: Sequence[Tensor], tensors: Sequence[Tensor]) -> Any:
    """Return a work that is over when all works are, and what has arrived is in its place."""
    under_way = list(works)

    def finish(timeout: timedelta) -> bool:
        # A wait without a limit of its own has zero for it, or -1 milliseconds: then the group's counts.
        limit = (timeout,) if timeout > timedelta(0) else ()
        ends = [bool(work.wait(*limit)) for work in under_way]
        # A stage of a pipeline receives into leaves that want a gradient.
        with torch.no_grad():
            for tensor, arrived in zip(tensors, arriving, strict=True):
                tensor.copy_(arrived)
        return all(ends)

    return PythonCallbackWork(finish).boxed()


def _cpu_backend(group: Any) -> Any:
    unboxed = group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)
    return unboxed._get_backend(_CPU)


_KERNELS: dict[str, Callable[..., Any]] = {
    "send": send_staged,
    "recv_": receive_staged,
    "allgather_into_tensor_coalesced_": gather_staged,
    "reduce_scatter_tensor_coalesced_": scatter_sums_staged,
    "allreduce_coalesced_": reduce_staged,
}
