"""Finds reads of memory that was allocated and never written: what a collective that is not issued leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from moeverify.collectives.trace import find_site
from moeverify.diagnose.operators import (
    OperatorWatch,
    has_memory,
    has_own_operators,
    is_passed_by,
    is_view,
    list_tensors,
    pair_arguments,
)

Ends = frozenset[tuple[str, str]]
"""(direction, module) of the modules inside of which something happens."""

_ALLOCATE = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
)
# These look at the shape alone, or write over what they are given.
_IGNORE = frozenset(
    {
        *("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_zeros", "new_ones", "new_full", "is_same_size", "record_stream", "resize_", "set_"),
        *("scatter", "index_copy", "index_put", "slice_scatter", "select_scatter", "as_strided_scatter"),
    }
)
_MOST_READS = 64
_FEWEST_INTEGERS = 8
_SMALL = 1.2345e-4
_MOST_KNOWN = 4096


@dataclass(frozen=True)
class UnwrittenRead:
    """A read of memory of a shape that nothing has written; sites are `file:line in function`.

    `inside` are the modules inside of which it was read.
    """

    allocated_at: str
    read_at: str
    shape: tuple[int, ...]
    inside: Ends


class UnwrittenWatch(OperatorWatch):
    """Notes in `reads` what is read before anything is written to it, while `inside` gives modules.

    A storage counts as written with the first write to a part of it, and with each collective that gets it, so that
    nothing is called unwritten that is not. A kernel that is no operator of torch, such as one of Triton, writes
    unseen: so memory is filled where it is allocated, and unwritten is only what still holds nothing else when it is
    read. It is filled with harmless numbers, since some of what is read is multiplied by zero. Subclasses of tensors
    are seen as what they are made of.
    """

    def __init__(self, inside: Callable[[], Ends | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads: list[UnwrittenRead] = []
        self._inside = inside
        # A weak reference keeps the address of a storage from being given to another one.
        self._unwritten: dict[int, tuple[StorageWeakRef, str, tuple[int, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_passed_by(func, types):
            return func(*args, **(kwargs or {}))
        if any(map(has_own_operators, types)):
            return NotImplemented
        name = func.overloadpacket.__name__
        if self._unwritten and name not in _ALLOCATE and name not in _IGNORE:
            self._look(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if name in _ALLOCATE and isinstance(result, Tensor) and _is_followed(result):
            flat = _read_storage(result)
            flat.copy_(_make_fill(flat))
            self._note_allocation(result, find_site(__file__))
        return result

    def _look(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note what a call reads of unwritten memory, and that what it writes is written."""
        if is_view(func):
            return
        is_known = func.namespace == "aten"
        for argument, value in pair_arguments(func, args, kwargs):
            is_written = not is_known or (argument.alias_info is not None and argument.alias_info.is_write)
            for tensor in list_tensors(value):
                key = tensor.untyped_storage()._cdata
                known = self._unwritten.get(key)
                if known is None:
                    continue
                if is_written or not _is_still_filled(tensor):
                    del self._unwritten[key]
                else:
                    self._note_read(known[1], known[2])

    def _note_read(self, allocated_at: str, shape: tuple[int, ...]) -> None:
        inside = self._inside()
        if inside is None or len(self.reads) >= _MOST_READS:
            return
        read = UnwrittenRead(allocated_at, find_site(__file__), shape, inside)
        if read not in self.reads:
            self.reads.append(read)

    def _note_allocation(self, tensor: Tensor, site: str) -> None:
        if len(self._unwritten) >= _MOST_KNOWN:
            known = self._unwritten.items()
            left = {key: each for key, each in known if not each[0].expired()}  # type: ignore[no-untyped-call]
            self._unwritten = left if len(left) < _MOST_KNOWN else {}
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._unwritten[storage._cdata] = (reference, site, tuple(tensor.shape))


def _is_followed(tensor: Tensor) -> bool:
    """Return whether a fill can be told from what others write: not in few integers, and not in flags."""
    is_integer = tensor.dtype in (torch.int32, torch.int64) and tensor.numel() >= _FEWEST_INTEGERS
    is_known = is_integer or tensor.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    return is_known and has_memory(tensor) and not _is_captured(tensor)


def _is_captured(tensor: Tensor) -> bool:
    """Return whether operators are being captured for a graph, where nothing can be looked at."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _read_storage(tensor: Tensor) -> Tensor:
    """Return all elements of the storage of a tensor, as a flat tensor in the same memory."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


def _make_fill(flat: Tensor) -> Tensor:
    """Return what unwritten memory is filled with: a small number (1,), or zeros and ones in turn, as indices."""
    if flat.is_floating_point():
        return flat.new_full((1,), _SMALL)
    return torch.arange(len(flat), dtype=flat.dtype, device=flat.device) % 2


def _is_still_filled(tensor: Tensor) -> bool:
    """Return whether the memory of a tensor holds what it was filled with and nothing else."""
    if _is_captured(tensor):
        return False
    if tensor.dtype not in (torch.int32, torch.int64) and not tensor.is_floating_point():
        return False  # looked at as something else than it was allocated as
    flat = _read_storage(tensor)
    return bool((flat == _make_fill(flat)).all())
