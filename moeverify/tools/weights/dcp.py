"""Weights in the format of `torch.distributed.checkpoint`: FQNs of moeverify, every tensor in chunks.

Any program that loads a distributed checkpoint can read them under any layout. Tensors are read with
torch's `weights_only` unpickler. The file `.metadata` is a pickle too, which torch itself would load
without restrictions. Here it is read by an unpickler that accepts only the classes of checkpoint metadata.
"""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, EnumMeta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any, TypeGuard, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.utils import _create_file_view

from moeverify.errors import FormatError, join_problems
from moeverify.input_file import open_input
from moeverify.tools.weights.description import METADATA
from moeverify.tools.weights.source import Chunk, Read, Spec
from moeverify.tools.weights.tensor_mapping import Ranges, Shape

_SAFE = {
    "torch": {"Size"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
}  # fmt: skip


def _read_member(owner: Any, name: str) -> Enum:
    """Return a member of an enumeration, in place of `getattr`, with which Python before 3.11.4 writes members."""
    if not (isinstance(owner, EnumMeta) and name in owner.__members__):
        raise pickle.UnpicklingError(f"{name} of {owner!r} does not belong into a checkpoint's metadata")
    return cast(Enum, owner[name])


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler that accepts only the classes in `_SAFE`, members of their enumerations and dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that checkpoint metadata may contain.

        Raises: UnpicklingError for any other class.
        """
        if (module, name) == ("builtins", "getattr"):
            return _read_member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _SAFE.get(module, set()):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into a checkpoint's metadata")
        found: Any = super().find_class(module, name)
        return found


class DcpSource:
    """The weights of a model in a distributed checkpoint; a `WeightSource`.

    The last stored chunk is cached, so reading a large one piece by piece loads it once.

    Raises: FormatError with the file and the key.
    """

    def __init__(self, folder: Path, shapes: Mapping[str, Shape], drop: Sequence[str] = ()) -> None:
        self._folder = folder
        metadata = read_metadata(folder)
        problems = [
            f"{folder / METADATA}: {name} is no tensor of this model; --drop leaves tensors out"
            for name in metadata.state_dict_metadata
            if name not in shapes and not any(fnmatchcase(name, pattern) for pattern in drop)
        ]
        self._chunks: dict[str, list[ChunkStorageMetadata]] = {}
        for name, shape in shapes.items():
            try:
                self._chunks[name] = self._find_chunks(metadata, name, shape)
            except FormatError as error:
                problems.append(error.problem)
        if problems:
            raise FormatError(join_problems(problems))
        self._places = metadata.storage_data
        self.specs: Mapping[str, Spec] = {
            name: Spec(shape, stored.properties.dtype)
            for name, shape in shapes.items()
            if isinstance(stored := metadata.state_dict_metadata[name], TensorStorageMetadata)
        }
        self.num_bytes_read = 0
        self._check_files()
        self._last: tuple[MetadataIndex, Tensor] | None = None

    def _find_chunks(self, metadata: Metadata, name: str, shape: Shape) -> list[ChunkStorageMetadata]:
        path = self._folder / METADATA
        stored = metadata.state_dict_metadata.get(name)
        if stored is None:
            raise FormatError(f"{path}: {name} is missing")
        if not isinstance(stored, TensorStorageMetadata):
            raise FormatError(f"{path}: {name} is no tensor")
        if tuple(stored.size) != shape:
            raise FormatError(f"{path}: {name} has shape {tuple(stored.size)}, and the model {shape}")
        if not _cover_once(stored.chunks, shape):
            raise FormatError(f"{path}: the chunks of {name} are not the whole of it")
        return list(stored.chunks)

    def _check_files(self) -> None:
        ends: dict[Path, int] = {}
        for place in self._places.values():
            file = self._folder / place.relative_path
            if file.parent != self._folder:
                raise FormatError(
                    f"{self._folder / METADATA}: {place.relative_path} is outside of the folder"
                )
            ends[file] = max(ends.get(file, 0), place.offset + place.length)
        for file, end in ends.items():
            if not file.exists():
                raise FormatError(f"{file}: the file is missing")
            if file.stat().st_size < end:
                raise FormatError(f"{file}: it is cut off at {file.stat().st_size} of {end} bytes")

    def read(self, name: str, box: Ranges, out: Tensor) -> Tensor:
        """Fill `out` with a box of the tensor `name`; see `WeightSource`."""
        for chunk in self._chunks[name]:
            shared = [
                range(max(at, indices.start), min(at + size, indices.stop))
                for at, size, indices in zip(chunk.offsets, chunk.sizes, box, strict=True)
            ]
            if all(shared):
                stored = self._load(name, chunk)
                here = tuple(
                    slice(r.start - i.start, r.stop - i.start) for r, i in zip(shared, box, strict=True)
                )
                there = tuple(
                    slice(r.start - at, r.stop - at) for r, at in zip(shared, chunk.offsets, strict=True)
                )
                out[here] = stored[there]
        return out

    def _load(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        index = MetadataIndex(name, chunk.offsets)
        if self._last is not None and self._last[0] == index:
            return self._last[1]
        self._last = None
        place = self._places.get(index)
        if place is None:
            raise FormatError(f"{self._folder / METADATA}: {name} at {tuple(chunk.offsets)} is nowhere")
        path = self._folder / place.relative_path
        try:
            with path.open("rb") as file:
                view = cast(IO[bytes], _create_file_view(file, place.offset, place.length))
                tensor = torch.load(view, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise FormatError(f"{path}: {name} cannot be read ({error})") from None
        if (
            not isinstance(tensor, Tensor)
            or tensor.shape != chunk.sizes
            or tensor.dtype != self.specs[name].dtype
        ):
            raise FormatError(f"{path}: {name} does not match {METADATA}")
        self.num_bytes_read += tensor.nbytes
        self._last = index, tensor
        return tensor


def read_metadata(folder: Path) -> Metadata:
    """Return the metadata of a distributed checkpoint without executing code from the file.

    Raises: FormatError when the file is missing, unreadable or contains anything else.
    """
    path = folder / METADATA
    try:
        with open_input(path) as file:
            metadata = _MetadataUnpickler(file).load()
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror}") from None
    except Exception as error:  # a broken pickle may raise any exception
        raise FormatError(f"{path}: it is no metadata of a distributed checkpoint ({error})") from None
    if not isinstance(metadata, Metadata):
        raise FormatError(f"{path}: it is no metadata of a distributed checkpoint")
    for problem in _check_metadata(metadata):
        raise FormatError(f"{path}: it is damaged: {problem}")
    return metadata


def _check_metadata(metadata: Metadata) -> Iterator[str]:
    """Yield missing fields and values of wrong types in unpickled metadata."""
    # A pickle sets arbitrary attributes: any field may be missing.
    tensors, places = (getattr(metadata, name, None) for name in ("state_dict_metadata", "storage_data"))
    if not isinstance(tensors, dict) or not isinstance(places, dict):
        yield "its lists of tensors and files are not there"
        return
    for name, stored in tensors.items():
        if not isinstance(name, str):
            yield f"a tensor is called {name!r}"
        elif isinstance(stored, TensorStorageMetadata) and not _is_whole(stored):
            yield f"its entry of {name} is incomplete"
    for index, place in places.items():
        numbers = [getattr(place, field, None) for field in ("offset", "length")]
        is_named = isinstance(index, MetadataIndex) and isinstance(getattr(place, "relative_path", None), str)
        if not is_named or any(type(number) is not int or number < 0 for number in numbers):
            yield f"the place of {getattr(index, 'fqn', index)!r} in its files is incomplete"


def _is_whole(stored: TensorStorageMetadata) -> bool:
    """Return whether shape, dtype and chunks of a tensor are complete."""
    size, chunks = getattr(stored, "size", None), getattr(stored, "chunks", None)
    dtype = getattr(getattr(stored, "properties", None), "dtype", None)
    if not _is_shape(size) or not isinstance(chunks, list) or not isinstance(dtype, torch.dtype):
        return False
    for chunk in chunks:
        offsets, sizes = getattr(chunk, "offsets", None), getattr(chunk, "sizes", None)
        if not _is_shape(offsets) or not _is_shape(sizes) or not len(offsets) == len(sizes) == len(size):
            return False
    return True


def _is_shape(value: Any) -> TypeGuard[Sequence[int]]:
    return isinstance(value, tuple) and all(type(number) is int and number >= 0 for number in value)


def _cover_once(chunks: Sequence[ChunkStorageMetadata], shape: Shape) -> bool:
    """Return whether the chunks cover every element of a tensor exactly once."""
    boxes = [
        [(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True)] for chunk in chunks
    ]
    if any(stop > most for box in boxes for (_, stop), most in zip(box, shape, strict=True)):
        return False
    overlap = any(
        all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in zip(one, other, strict=True))
        for one, other in itertools.combinations(boxes, 2)
    )
    return not overlap and sum(math.prod(chunk.sizes) for chunk in chunks) == math.prod(shape)


class _Planner(DefaultSavePlanner):
    """Planner that reads each chunk when torch's writer is about to write it.

    The writer keeps every tensor until it closes the file, so all of them may share one buffer.
    """

    def __init__(self, chunks: Mapping[MetadataIndex, Chunk], read: Read) -> None:
        super().__init__()
        self._chunks = chunks
        self._read = read

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the values of one item of the plan."""
        return self._read(self._chunks[write_item.index])


class DcpSink:
    """A `Sink` that writes a distributed checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, chunks: Sequence[Chunk], read: Read) -> None:
        """Write each chunk as one chunk of the checkpoint; see `Sink`."""
        by_index = {_index(chunk): chunk for chunk in chunks}
        items = [_plan(index, chunk) for index, chunk in by_index.items()]
        # No copy-ahead: on a machine with a GPU it would hold several chunks.
        writer = FileSystemWriter(self._folder, thread_count=1, per_thread_copy_ahead=0)
        writer.set_up_storage_writer(True)
        [plan] = writer.prepare_global_plan([writer.prepare_local_plan(SavePlan(items))])
        results = writer.write_data(plan, _Planner(by_index, read)).wait()
        stored_chunks: dict[str, list[ChunkStorageMetadata]] = {}
        for item in items:
            assert item.tensor_data is not None
            stored_chunks.setdefault(item.index.fqn, []).append(item.tensor_data.chunk)
        tensors = {
            chunk.name: TensorStorageMetadata(
                TensorProperties(chunk.spec.dtype), torch.Size(chunk.spec.shape), stored_chunks[chunk.name]
            )
            for chunk in chunks
        }
        writer.finish(Metadata(dict(tensors)), [results])


def _index(chunk: Chunk) -> MetadataIndex:
    offsets = torch.Size([chunk.rows.start, *(0 for _ in chunk.spec.shape[1:])])
    return MetadataIndex(chunk.name, offsets)


def _plan(index: MetadataIndex, chunk: Chunk) -> WriteItem:
    assert index.offset is not None
    sizes = torch.Size([len(indices) for indices in chunk.box])
    data = TensorWriteData(
        ChunkStorageMetadata(index.offset, sizes),
        TensorProperties(chunk.spec.dtype),
        torch.Size(chunk.spec.shape),
    )
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)
