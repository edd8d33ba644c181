"""The tensors of a safetensors file as views of the mapped file: data is read on first access.

The safetensors library offers such views too, but uses several torch operations per view. Each operation
releases the interpreter lock and waits to get it back, which is slow for many tensors beside a training.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moeverify.dtype_names import DTYPES
from moeverify.errors import FormatError
from moeverify.json_file import parse_json

# The dtypes of nearly all tensors of a golden. Other dtypes use integers of their size, because NumPy does
# not know all of them.
_NUMBERS = {torch.float64: "f8", torch.float32: "f4"}


class MappedFile:
    """Views of a file's tensors. Writing to a view changes neither the file nor another reader's view.

    Raises: FormatError when the file is missing or truncated.
    """

    def __init__(self, path: Path) -> None:
        try:
            with safe_open(path, framework="numpy"):  # checks the header against the file size
                pass
        except (OSError, SafetensorError) as error:
            raise FormatError(f"{path}: cannot be read ({error})") from error
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(size))
        self._start = 8 + size
        self._places = {key: entry for key, entry in header.items() if key != "__metadata__"}
        self._bytes = np.memmap(path, dtype=np.uint8, mode="c")

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return sorted(self._places)

    def __contains__(self, key: str) -> bool:
        """Return whether the file has a tensor of this name."""
        return key in self._places

    def whole(self, key: str) -> Tensor:
        """Return a tensor by its name. Raises: KeyError when the file has no such tensor."""
        return self.box(key, [range(size) for size in self._places[key]["shape"]])

    def has_box(self, key: str, dims: Sequence[range]) -> bool:
        """Return whether a tensor has all these indices."""
        shape = self._places[key]["shape"]
        return len(shape) == len(dims) and all(
            indices.stop <= size for indices, size in zip(dims, shape, strict=True)
        )

    def box(self, key: str, dims: Sequence[range]) -> Tensor:
        """Return the part of a tensor within these indices of every dim, each a range of step 1."""
        entry = self._places[key]
        dtype = DTYPES[entry["dtype"]]
        stride = dtype.itemsize
        offset = self._start + entry["data_offsets"][0]
        strides = []
        for size, indices in zip(reversed(entry["shape"]), reversed(dims), strict=True):
            strides.append(stride)
            offset += indices.start * stride
            stride *= size
        shape = [len(indices) for indices in dims]
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)
        numbers = _NUMBERS.get(dtype, f"i{dtype.itemsize}")
        array = np.ndarray(shape, numbers, self._bytes, offset, strides[::-1])
        tensor = torch.from_numpy(array)
        return tensor if tensor.dtype is dtype else tensor.view(dtype)
