"""The side of torch's distributed checkpoint that saves: which boxes this rank has, and how they reach the disk.

torch plans (which rank writes a box that several hold, whether the boxes of all ranks cover every tensor
once) and moves the plans between the ranks; here a rank's boxes become one safetensors file, without torch's
pickles, and the manifest is written when all ranks are through.
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

from moeverify.checkpoint.hyperrect import Hyperrect
from moeverify.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    StoredChunk,
    StoredFile,
    StoredTensor,
    write_manifest,
)
from moeverify.dtype_names import DTYPE_NAMES
from moeverify.errors import MachineError

_CHUNK = 1 << 24  # bytes that are hashed while they are in the cache, then written


class Part(NamedTuple):
    """One box of a logical tensor as this rank holds it."""

    key: str
    shape: tuple[int, ...]
    box: Hyperrect


class HyperrectPlanner(DefaultSavePlanner):
    """Offers torch the boxes of this rank. The state dict has the local tensor of each part by its number."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = {
            MetadataIndex(part.key, part.box.offset): (str(number), part) for number, part in enumerate(parts)
        }

    def create_local_plan(self) -> SavePlan:
        """Return the boxes of this rank; torch chooses one rank for a box that several have."""
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
    """Writes below `partial`, and on rank 0 gives it the name `folder` when every rank's part is on disk."""

    def __init__(self, folder: Path, partial: Path, facts: Mapping[str, Any]) -> None:
        self.folder = folder
        self.partial = partial
        self.facts = facts
        self._naming = threading.Lock()
        self._is_cancelled = False

    def cancel(self) -> None:
        """Take care that the checkpoint gets no name any more, unless it has it when this returns.

        A save in the background goes on after an interrupt; what it has written may be removed after this.
        """
        with self._naming:
            self._is_cancelled = True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: what a rank writes depends on its plan alone."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the folder; every rank may be on a machine of its own."""
        self.partial.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank the name of its file."""
        return [
            dataclasses.replace(plan, storage_data=f"rank-{rank:05d}.safetensors")
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's boxes to its file, to the disk."""
        done: Future[list[WriteResult]] = Future()
        done.set_result(write_boxes(self.partial, plan.storage_data, plan.items, planner))
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest and give the checkpoint its name. Called on rank 0 when all ranks have written."""
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
        """Return what torch wants to log."""
        return StorageMeta(checkpoint_id=str(self.folder))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a checkpoint can be there."""
        return True


def write_boxes(
    folder: Path, name: str, items: Sequence[WriteItem], planner: SavePlanner
) -> list[WriteResult]:
    """Write boxes as one safetensors file and return where each of them is; one tensor is copied at a time."""
    # Widest first, so that every value lies where its type may lie.
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
    """Write the manifest into the partial folder, bring it to the disk, and rename the folder to its name."""
    with (partial / MANIFEST).open("x", encoding="utf-8") as file:
        file.write(write_manifest(manifest))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(partial)
    partial.rename(folder)  # one step: before it there is no checkpoint, after it there is a whole one
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_partial(folder: Path) -> None:
    """Remove what saves of this checkpoint that never ended have left."""
    for left in folder.parent.glob(f".{folder.name}.*.partial"):
        shutil.rmtree(left, ignore_errors=True)
