"""Saving side of torch's distributed checkpoint: the boxes of this rank, and their way to disk.

torch plans and communicates: it chooses one rank for a box that several hold, and checks that the boxes of
all ranks cover every tensor once. Here the boxes of a rank become one safetensors file, without torch's
pickles. The manifest is written after all ranks have finished.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import threading
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from moeverify.dtype_names import DTYPE_NAMES
from moeverify.errors import MachineError
from moeverify.tools.checkpoint.hyperrect import Hyperrect
from moeverify.tools.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    StoredChunk,
    StoredFile,
    StoredTensor,
    write_manifest,
)

_CHUNK = 1 << 24  # bytes that are hashed while in cache, then written


class HeldBox(NamedTuple):
    """One box of a logical tensor that this rank holds."""

    key: str
    shape: tuple[int, ...]
    box: Hyperrect


class HyperrectPlanner(DefaultSavePlanner):
    """Planner that offers torch the boxes of this rank.

    The state dict has the local tensor of each part by its number.
    """

    def __init__(self, parts: Sequence[HeldBox]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = {
            MetadataIndex(part.key, part.box.offset): (str(number), part) for number, part in enumerate(parts)
        }

    def create_local_plan(self) -> SavePlan:
        """Return the boxes of this rank; torch chooses one rank for a box that several hold."""
        items = []
        for index, (number, part) in self._parts.items():
            properties = TensorProperties(dtype=self.state_dict[number].dtype)
            chunk = ChunkStorageMetadata(torch.Size(part.box.offset), torch.Size(part.box.shape))
            data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(part.shape))
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return the local tensor of a box."""
        tensor: Tensor = self.state_dict[self._parts[index][0]]
        return tensor


class SafeWriter(StorageWriter):
    """Writer into the folder `partial`; rank 0 renames it to `folder` when all ranks' parts are on disk."""

    def __init__(self, folder: Path, partial: Path, facts: Mapping[str, Any]) -> None:
        self.folder = folder
        self.partial = partial
        self.facts = facts
        self._naming = threading.Lock()
        self._is_cancelled = False

    def cancel(self) -> None:
        """Prevent the final rename, unless it has already happened when this returns.

        A background save continues after an interrupt; its files may be removed after this call.
        """
        with self._naming:
            self._is_cancelled = True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: a rank's output depends only on its plan."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the folder on every rank, because ranks may be on different machines."""
        self.partial.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Assign each rank the name of its file."""
        return [
            dataclasses.replace(plan, storage_data=f"rank-{rank:05d}.safetensors")
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's boxes to its file and sync it to disk."""
        done: Future[list[WriteResult]] = Future()
        done.set_result(write_boxes(self.partial, plan.storage_data, plan.items, planner))
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest and rename the checkpoint; called on rank 0 when all ranks have written.

        Raises: MachineError when the save was cancelled.
        """
        files: dict[str, StoredFile] = {}
        chunks: dict[str, list[StoredChunk]] = {}
        for result in (result for part in results for result in part):
            if isinstance(result.storage_data, StoredChunk):
                chunks.setdefault(result.index.fqn, []).append(result.storage_data)
            else:
                files[result.index.fqn] = result.storage_data
        tensors = {
            key: StoredTensor(DTYPE_NAMES[known.properties.dtype], tuple(known.size), tuple(chunks[key]))
            for key, known in metadata.state_dict_metadata.items()
            if isinstance(known, TensorStorageMetadata)
        }
        with self._naming:
            if self._is_cancelled:
                raise MachineError("the save was interrupted")
            commit(self.folder, self.partial, Manifest(self.facts, files, tensors))

    def storage_meta(self) -> StorageMeta:
        """Return the metadata that torch logs."""
        return StorageMeta(checkpoint_id=str(self.folder))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True: any path may be a checkpoint."""
        return True


def write_boxes(
    folder: Path, name: str, items: Sequence[WriteItem], planner: SavePlanner
) -> list[WriteResult]:
    """Write boxes as one safetensors file and return their locations; one tensor is copied at a time."""
    # Widest dtype first, so that every tensor is aligned to its dtype.
    ordered = sorted(items, key=lambda item: -_data(item).properties.dtype.itemsize)
    header, start, entries = {}, 0, []
    for item in ordered:
        data = _data(item)
        end = start + data.chunk.sizes.numel() * data.properties.dtype.itemsize
        dtype = DTYPE_NAMES[data.properties.dtype]
        name_in_file = f"{item.index.fqn}@{','.join(map(str, data.chunk.offsets))}"
        header[name_in_file] = {
            "dtype": dtype,
            "shape": list(data.chunk.sizes),
            "data_offsets": [start, end],
        }
        entries.append((item, start))
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    prefix = len(text).to_bytes(8, "little") + text
    results = []
    with (folder / name).open("xb") as file:
        file.write(prefix)
        for item, begin in entries:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            checksum = _write_tensor(file, tensor)
            chunk = _data(item).chunk
            box = Hyperrect(tuple(chunk.offsets), tuple(chunk.sizes))
            results.append(
                _result(item.index, box.numel, StoredChunk(box, name, len(prefix) + begin, checksum))
            )
        file.flush()
        os.fsync(file.fileno())
    whole = StoredFile(len(prefix) + start, len(prefix), zlib.crc32(prefix))
    return [*results, _result(MetadataIndex(name), whole.size, whole)]


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None
    return item.tensor_data


def _result(index: MetadataIndex, size: int, where: StoredChunk | StoredFile) -> WriteResult:
    return WriteResult(index=index, size_in_bytes=size, storage_data=where)


def _write_tensor(file: Any, tensor: Tensor) -> int:
    """Write the values in row-major order and return their CRC-32."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    content, checksum = memoryview(flat.numpy().data), 0
    for start in range(0, len(content), _CHUNK):
        chunk = content[start : start + _CHUNK]
        checksum = zlib.crc32(chunk, checksum)
        file.write(chunk)
    return checksum


def commit(folder: Path, partial: Path, manifest: Manifest) -> None:
    """Write the manifest into the partial folder, sync it to disk, and rename the folder."""
    with (partial / MANIFEST).open("x", encoding="utf-8") as file:
        file.write(write_manifest(manifest))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(partial)
    partial.rename(folder)  # atomic: there is either no checkpoint or a complete one
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Sync the entries of a folder to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_partial(folder: Path) -> None:
    """Remove partial folders of unfinished saves of this checkpoint."""
    for left in folder.parent.glob(f".{folder.name}.*.partial"):
        shutil.rmtree(left, ignore_errors=True)
