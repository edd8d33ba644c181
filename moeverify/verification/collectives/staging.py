"""Staging through the CPU of GPU collectives that gloo cannot perform, for ranks that share a GPU.

In most collectives the gloo backend of torch copies GPU tensors itself. It passes the GPU address of a
point-to-point message directly to a socket, and reads the tensors of coalesced collectives, which DTensor
issues, on the host. Both end in a segmentation fault (torch 2.11 to 2.13, ProcessGroupGloo.cpp).
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
# Dispatch directly to gloo: observers of collectives have already seen the staged one.
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def stage_collectives(device_type: str = "CUDA") -> torch.library.Library:
    """Stage messages and coalesced collectives of tensors on this device type through the CPU.

    Only for gloo groups: NCCL reads GPU memory directly. Active for the lifetime of the returned library.
    """
    library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    for name, kernel in _KERNELS.items():
        library.impl(name, kernel, device_type, allow_override=True)  # type: ignore[no-untyped-call]
    return library


def send_staged(tensors: Sequence[Tensor], group: Any, destination: int, tag: int) -> Any:
    """Send a copy of the single tensor. Collective: the group's rank `destination` receives."""
    (tensor,) = tensors
    return _cpu_backend(group).send([_copy(tensor)], destination, tag).boxed()


def receive_staged(tensors: Sequence[Tensor], group: Any, source: int, tag: int) -> Any:
    """Receive into a CPU copy. The returned work copies it into the single tensor when waited for."""
    (tensor,) = tensors
    arriving = _make_room(tensor)
    return _deliver([_cpu_backend(group).recv([arriving], source, tag)], [arriving], [tensor])


def gather_staged(outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: Any, *options: Any) -> Any:
    """Gather each input (n, ...) into the output (ranks * n, ...). Collective: all ranks."""
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
    """Reduce each input (ranks * n, ...) and scatter it to the output (n, ...). Collective: all ranks."""
    arriving = [_make_room(tensor) for tensor in outputs]
    scatter = torch.ops.c10d._reduce_scatter_base_.default.redispatch
    works = [
        scatter(_KEYS, part, _copy(whole), group, operation, *options)[1]
        for part, whole in zip(arriving, inputs, strict=True)
    ]
    return _deliver(map(dist.Work.unbox, works), arriving, outputs)


def reduce_staged(tensors: Sequence[Tensor], group: Any, operation: Any, *options: Any) -> Any:
    """Reduce each of the tensors in place. Collective: all ranks of the group."""
    arriving = [_copy(tensor) for tensor in tensors]
    reduce = torch.ops.c10d.allreduce_.default.redispatch
    works = [reduce(_KEYS, [tensor], group, operation, None, *options)[1] for tensor in arriving]
    return _deliver(map(dist.Work.unbox, works), arriving, tensors)


def _copy(tensor: Tensor) -> Tensor:
    """Return a contiguous CPU copy that later writes by the sender do not affect."""
    return tensor.detach().to(_CPU, copy=True).contiguous()


def _make_room(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _deliver(works: Iterable[Any], arriving: Sequence[Tensor], tensors: Sequence[Tensor]) -> Any:
    """Return a work that waits for all works and then copies the received data into the tensors."""
    under_way = list(works)

    def finish(timeout: timedelta) -> bool:
        # A wait without a timeout passes zero or -1 milliseconds. The timeout of the group applies then.
        limit = (timeout,) if timeout > timedelta(0) else ()
        ends = [bool(work.wait(*limit)) for work in under_way]
        # A pipeline stage receives into leaf tensors that require gradients.
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
