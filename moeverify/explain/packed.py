"""Serialization of programs, which have thousands of small tensors that share memory.

torch pickles each storage as a file of its own. Here each storage is written once, as bytes, and tensors as
views of it.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor

_PROTOCOL = 5


def pack(value: object) -> bytes:
    """Return a value as bytes. CPU tensors keep their strides, and views the memory that they share."""
    file = io.BytesIO()
    _Packer(file).dump(value)
    return file.getvalue()


def unpack(packed: bytes) -> Any:
    """Return a value from the bytes that `pack` returned. The bytes must be trusted: they are a pickle."""
    return pickle.loads(packed)


class _Memory:
    """Bytes of a storage, which are not copied before they are written."""

    def __init__(self, raw: bytearray) -> None:
        self.flat = torch.frombuffer(raw, dtype=torch.uint8)

    @classmethod
    def of(cls, storage: torch.UntypedStorage) -> _Memory:
        memory = cls.__new__(cls)
        memory.flat = torch.empty(0, dtype=torch.uint8).set_(storage)
        return memory

    def __reduce__(self) -> tuple[type[_Memory], tuple[pickle.PickleBuffer]]:
        raw: Any = self.flat.numpy()
        return _Memory, (pickle.PickleBuffer(raw),)


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self._memories: dict[int, _Memory] = {}

    def reducer_override(self, value: Any) -> Any:
        """Return how to rebuild a plain tensor. Everything else is pickled as usual."""
        if type(value) is not Tensor or not _is_plain(value):
            return NotImplemented
        storage = value.untyped_storage()
        memory = self._memories.get(storage._cdata)
        if memory is None:
            memory = self._memories[storage._cdata] = _Memory.of(storage)
        place = (tuple(value.shape), value.stride(), value.storage_offset())
        return _view, (memory, value.dtype, *place)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is fully described by its memory and geometry."""
    is_dense = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    is_simple = not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
    return is_dense and is_simple and tensor.untyped_storage().nbytes() > 0


def _view(
    memory: _Memory, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> Tensor:
    return torch.empty(0, dtype=dtype).set_(memory.flat.untyped_storage(), offset, shape, stride)
