"""Count of the operations that a rank dispatches to its device, on CPU and GPU and without a profiler.

On a GPU each operation is at least one kernel and costs several microseconds of host time, regardless of
its size. Some operations, such as a sort, are several kernels. Compiled code is not visible, since torch
runs it without compilation while a mode is active.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moeverify.results.measurement import Operations

# Operations that only allocate memory or work on the host.
_FREE = frozenset(
    {
        *("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize_"),
        *("_unsafe_view", "promote_types", "set_", "lift_fresh"),
    }
)
_COLLECTIVES = ("c10d", "_c10d_functional")
# Operations that make the host wait for the device, for a size or a Python number.
_WAITS = frozenset(
    {
        *(Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.nonzero, Tensor.masked_select),
        *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.unique, Tensor.equal),
        *(torch.nonzero, torch.masked_select, torch.unique, torch.equal, torch.allclose, torch.bincount),
    }
)


def count_operations(call: Callable[[], object]) -> Operations:
    """Return the operations that a call dispatches in this thread, including its backward passes."""
    dispatched, called = _Dispatched(), _Called()
    with called, dispatched:
        call()
    return Operations(
        kernels=dispatched.kernels,
        collectives=dispatched.collectives,
        waits=called.waits,
        traffic=dispatched.traffic,
    )


class _Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = self.collectives = self.traffic = 0

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the operations on its local tensors arrive here separately
        if func.namespace in _COLLECTIVES:
            self.collectives += 1
        elif func.namespace != "profiler" and not _is_free(func):
            self.kernels += 1
            result = func(*args, **(kwargs or {}))
            self.traffic += _count_bytes((args, kwargs, result))
            return result
        return func(*args, **(kwargs or {}))


class _Called(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _WAITS:
            self.waits += 1
        return func(*args, **(kwargs or {}))


def _count_bytes(values: Any) -> int:
    """Return the bytes that an operation reads and writes. Tensors updated in place count twice."""
    return sum(value.nbytes for value in tree_leaves(values) if isinstance(value, Tensor))


def _is_free(func: Any) -> bool:
    """Return whether an operation needs no device work: a view or an allocation."""
    return func.is_view or func.overloadpacket.__name__ in _FREE
