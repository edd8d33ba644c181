"""Loading side of torch's distributed checkpoint: the boxes that this rank needs, and their bytes.

For each requested box torch finds the saved boxes that overlap it. The overlaps are copied here from the
mapped files directly to the rank's tensors, so a rank reads only its part.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from moeverify.dtype_names import DTYPES
from moeverify.errors import FormatError
from moeverify.tools.checkpoint.manifest import Manifest, StoredChunk, StoredTensor
from moeverify.tools.checkpoint.writer import HeldBox

_CHUNK = 1 << 24
_MAPPED = 1 << 26  # mapped pages count as memory of this process until they are released


class HyperrectLoadPlanner(LoadPlanner):
    """Planner that requests the boxes of this rank.

    The state dict has the local tensor of each part by its number.
    """

    def __init__(self, parts: Sequence[HeldBox], state: dict[str, Tensor]) -> None:
        self._parts = parts
        self._state = state
        self._numbers = {
            MetadataIndex(part.key, part.box.offset): number for number, part in enumerate(parts)
        }

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Store the metadata of the checkpoint."""
        assert metadata is not None
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """Return the read plan of this rank: for each of its boxes, the overlaps with saved boxes.

        Raises: FormatError when saved boxes do not cover a box of this rank.
        """
        items = []
        for part in self._parts:
            known = self._metadata.state_dict_metadata[part.key]
            assert isinstance(known, TensorStorageMetadata)
            chunk = ChunkStorageMetadata(torch.Size(part.box.offset), torch.Size(part.box.shape))
            found = create_read_items_for_chunk_list(part.key, known, [chunk])
            if sum(item.lengths.numel() for item in found) != part.box.numel:
                raise FormatError(f"{part.key}: the checkpoint does not hold all of {part.box}")
            items.extend(found)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged: each rank reads independently."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the plan of this rank."""
        return central_plan

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the part of a local tensor that an overlap fills."""
        tensor = self._state[str(self._numbers[read_item.dest_index])]
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, offset, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the data was written to the local tensor itself."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Raise FormatError: checkpoints of moeverify contain no objects."""
        raise FormatError(f"{read_item.dest_index.fqn} is an object and no tensor")

    def resolve_bytes(self, read_item: ReadItem) -> Any:
        """Raise FormatError: checkpoints of moeverify contain no objects."""
        raise FormatError(f"{read_item.dest_index.fqn} is an object and no tensor")


class SafeReader(StorageReader):
    """Reader for checkpoints of `SafeWriter`.

    The caller must have read the manifest and checked the files.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self._manifest = manifest
        self._chunks: dict[MetadataIndex, tuple[StoredTensor, StoredChunk]] = {
            MetadataIndex(key, chunk.box.offset): (tensor, chunk)
            for key, tensor in manifest.tensors.items()
            for chunk in tensor.chunks
        }

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a reader reads one checkpoint."""

    def read_metadata(self) -> Metadata:
        """Return the manifest as torch's metadata."""
        return Metadata(
            state_dict_metadata={
                key: TensorStorageMetadata(
                    properties=TensorProperties(dtype=DTYPES[tensor.dtype]),
                    size=torch.Size(tensor.shape),
                    chunks=[
                        ChunkStorageMetadata(torch.Size(chunk.box.offset), torch.Size(chunk.box.shape))
                        for chunk in tensor.chunks
                    ],
                )
                for key, tensor in self._manifest.tensors.items()
            },
            storage_meta=StorageMeta(checkpoint_id=str(self.folder)),
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: the manifest is known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy every overlap to its destination, file by file."""
        by_file: dict[str, list[tuple[ReadItem, StoredTensor, StoredChunk]]] = {}
        for item in plan.items:
            tensor, chunk = self._chunks[item.storage_index]
            by_file.setdefault(chunk.file, []).append((item, tensor, chunk))
        for name, wanted in by_file.items():
            with map_file(self.folder / name) as content:
                num_mapped = 0
                for item, tensor, chunk in wanted:
                    copy_overlap(content, item, tensor, chunk, planner)
                    num_mapped += tensor.num_bytes(chunk)
                    if num_mapped > _MAPPED:
                        content.madvise(mmap.MADV_DONTNEED)
                        num_mapped = 0
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True: any path may be a checkpoint."""
        return True


def copy_overlap(
    content: mmap.mmap, item: ReadItem, tensor: StoredTensor, chunk: StoredChunk, planner: LoadPlanner
) -> None:
    """Copy the overlap of a saved box and a box of this rank."""
    source = torch.frombuffer(content, dtype=DTYPES[tensor.dtype], count=chunk.box.numel, offset=chunk.start)
    source = source.view(chunk.box.shape)
    for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        source = source.narrow(dim, offset, length)
    target = planner.resolve_tensor(item)
    target.copy_(source)
    planner.commit_tensor(item, target)


@contextmanager
def map_file(path: Path) -> Iterator[mmap.mmap]:
    """Yield the mapped content of a file; pages are read on access.

    The pages are private, because torch warns about buffers that are not writable. Nothing writes to them.
    """
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    try:
        yield content
    finally:
        # A frame that raised may still hold a tensor on the mapping; it is released with the frame.
        with suppress(BufferError):
            content.close()


def check_files(folder: Path, manifest: Manifest, share: int, num_shares: int) -> None:
    """Check the size of all files, and the checksums of this share of headers and boxes.

    Raises: FormatError with the file and the key of the problem.
    """
    for name, known in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise FormatError(f"{path} is missing from the checkpoint: {error.strerror}") from None
        if size != known.size:
            raise FormatError(
                f"{path} has {size} bytes, and {known.size} were saved: it was cut off or replaced"
            )
    entries = [
        (chunk.file, chunk.start, tensor.num_bytes(chunk), chunk.checksum, key)
        for key, tensor in manifest.tensors.items()
        for chunk in tensor.chunks
    ]
    entries += [
        (name, 0, known.header, known.checksum, "its header") for name, known in manifest.files.items()
    ]
    for name, start, size, checksum, key in _take_share(sorted(entries), share, num_shares):
        with (folder / name).open("rb") as file:
            if _hash(file, start, size) != checksum:
                raise FormatError(
                    f"{folder / name}: {key} is damaged: its checksum is not the one that was saved"
                )


def _take_share(
    entries: Sequence[tuple[str, int, int, int, str]], share: int, num_shares: int
) -> Iterator[Any]:
    """Yield this share of the entries: contiguous, with about the same number of bytes as other shares."""
    total = sum(size for _, _, size, _, _ in entries)
    before = 0
    for entry in entries:
        middle = before + entry[2] / 2
        if share <= middle * num_shares / max(total, 1) < share + 1:
            yield entry
        before += entry[2]


def _hash(file: Any, start: int, size: int) -> int:
    file.seek(start)
    checksum = 0
    while size > 0:
        chunk = file.read(min(size, _CHUNK))
        if not chunk:
            return -1
        checksum = zlib.crc32(chunk, checksum)
        size -= len(chunk)
    return checksum
