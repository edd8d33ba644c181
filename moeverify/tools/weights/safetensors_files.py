"""Folders of safetensors files: reading of any box, and writing of large files chunk by chunk.

Reading uses the safetensors library, which validates the header of a file against its size. Its writer
needs all tensors of a file at once, so files are written here. The format is 8 bytes with the header
length, the header as JSON, and the tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moeverify.dtype_names import DTYPE_NAMES
from moeverify.errors import FormatError
from moeverify.tools.weights.safetensors_index import INDEX, SINGLE, read_index
from moeverify.tools.weights.source import CHUNK_BYTES, Chunk, Read, Spec
from moeverify.tools.weights.tensor_mapping import Ranges, Shape, TensorMapping, find_windows

# Bytes read through one mapping of a file. Its pages count as memory of this process until it is closed.
_MAPPED_BYTES = CHUNK_BYTES


class SafetensorsSource:
    """The weights of a model in a folder of safetensors files; a `WeightSource`.

    The constructor checks everything but the values. Every tensor must exist with its shape, and there must
    be no other tensor unless its key matches `drop`. `others` are further ways in which tensors may be stored.

    Raises: FormatError with the file and the key.
    """

    def __init__(
        self,
        folder: Path,
        mapping: TensorMapping,
        shapes: Mapping[str, Shape],
        drop: Sequence[str] = (),
        others: Sequence[TensorMapping] = (),
    ) -> None:
        self._places, self._mapping = read_index(folder, (mapping, *others), drop)
        self.specs: Mapping[str, Spec] = {
            name: Spec(shapes[name], self._find_dtype(name)) for name in mapping
        }
        self.num_bytes_read = 0
        self._open: tuple[Path, Any] | None = None
        self._num_mapped = 0

    def _find_dtype(self, name: str) -> torch.dtype:
        places = [self._places[mapped.key] for mapped in self._mapping[name]]
        for mapped, place in zip(self._mapping[name], places, strict=True):
            if place.dtype != places[0].dtype:
                raise FormatError(
                    f"{place.file}: {mapped.key} is {place.dtype}, and {self._mapping[name][0].key} of the same "
                    f"stack {places[0].dtype}"
                )
        return places[0].dtype

    def read(self, name: str, box: Ranges, out: Tensor) -> Tensor:
        """Fill `out` with a box of the tensor `name`; see `WeightSource`."""
        for window in find_windows(self._mapping[name], box):
            stored = self._read_stored(window.key, window.stored)
            part = stored.T if window.is_transposed else stored  # one expert; dim 0 of the target has size 1
            target = tuple(
                slice(indices.start - whole.start, indices.stop - whole.start)
                for indices, whole in zip(window.target, box, strict=True)
            )
            out[target] = part
        return out

    def _read_stored(self, key: str, box: Ranges) -> Tensor:
        path = self._places[key].file
        if self._open is None or self._open[0] != path or self._num_mapped > _MAPPED_BYTES:
            self._open = None
            self._open, self._num_mapped = (path, safe_open(path, framework="pt")), 0
        index = tuple(slice(indices.start, indices.stop) for indices in box)
        try:
            # A scalar cannot be sliced.
            part = cast(Tensor, self._open[1].get_slice(key)[index] if box else self._open[1].get_tensor(key))
        except (SafetensorError, OSError) as error:
            raise FormatError(f"{path}: {key}: {error}") from None
        self._num_mapped += part.nbytes
        self.num_bytes_read += part.nbytes
        return part


class SafetensorsSink:
    """A `Sink` that writes a folder of safetensors files.

    Files have at most `shard_bytes`, unless one tensor is larger. `metadata` is written to each header. The
    folder is complete when `write` returns.
    """

    def __init__(
        self,
        folder: Path,
        mapping: TensorMapping,
        specs: Mapping[str, Spec],
        *,
        shard_bytes: int,
        metadata: Mapping[str, str],
    ) -> None:
        self._folder = folder
        self._mapping = mapping
        self._metadata = metadata
        stored = {
            mapped.key: Spec(mapped.shape, specs[name].dtype) for name in mapping for mapped in mapping[name]
        }
        self._stored = stored
        self._shards = _fill_shards(stored, shard_bytes)
        self._offsets: dict[str, tuple[int, int]] = {}

    def write(self, chunks: Sequence[Chunk], read: Read) -> None:
        """Write all chunks; see `Sink`."""
        files: list[int] = []
        try:
            names = self._name_files()
            for number, (name, keys) in enumerate(zip(names, self._shards, strict=True)):
                files.append(os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
                self._begin(files[-1], number, keys)
            for chunk in chunks:
                self._write_chunk(files, chunk, read(chunk))
            for file in files:
                os.fsync(file)
        finally:
            for file in files:
                os.close(file)
        if len(names) > 1:
            self._write_index(names)

    def _name_files(self) -> list[str]:
        total = len(self._shards)
        if total == 1:
            return [SINGLE]
        return [f"model-{number:05d}-of-{total:05d}.safetensors" for number in range(1, total + 1)]

    def _begin(self, file: int, number: int, keys: Sequence[str]) -> None:
        """Write the header of a file and set the file size."""
        header: dict[str, Any] = {"__metadata__": dict(self._metadata)}
        at = 0
        for key in keys:
            spec = self._stored[key]
            span = [at, at + spec.num_bytes]
            header[key] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": span}
            at = span[1]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8, as the library writes them
        _write_at(file, len(text).to_bytes(8, "little") + text, 0)
        for key in keys:
            self._offsets[key] = number, 8 + len(text) + header[key]["data_offsets"][0]
        os.ftruncate(file, 8 + len(text) + at)

    def _write_chunk(self, files: Sequence[int], chunk: Chunk, values: Tensor) -> None:
        for window in find_windows(self._mapping[chunk.name], chunk.box):
            rows = window.target[0]
            part = values[rows.start - chunk.rows.start : rows.stop - chunk.rows.start]
            if window.is_transposed:
                part = part.squeeze(0).T
            number, start = self._offsets[window.key]
            stored = self._stored[window.key]
            row = stored.num_bytes // max(stored.shape[0], 1)
            _write_at(files[number], _as_bytes(part), start + window.stored[0].start * row)

    def _write_index(self, names: Sequence[str]) -> None:
        places = {key: name for name, keys in zip(names, self._shards, strict=True) for key in keys}
        total = sum(spec.num_bytes for spec in self._stored.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _fill_shards(stored: Mapping[str, Spec], shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for key, spec in stored.items():
        if shards[-1] and size + spec.num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(key)
        size += spec.num_bytes
    return shards


def _as_bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def _write_at(file: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:  # one call writes at most 2 GiB
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written
