"""The manifest of a checkpoint: `checkpoint.json`, plain JSON, written last.

A checkpoint is a folder with one `rank-N.safetensors` per rank and the manifest. The manifest has the facts
of the run and, for every logical tensor, its dtype, shape and chunks, each with file, start byte and
checksum. The folder is renamed to its final name when everything is on disk, so a folder with that name is
complete. Nothing in it is a pickle.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moeverify.dtype_names import DTYPES
from moeverify.errors import FormatError
from moeverify.input_file import parse_json, read_input
from moeverify.tools.checkpoint.hyperrect import Hyperrect

MANIFEST = "checkpoint.json"
FORMAT = "moeverify checkpoint"
VERSION = 1


@dataclass(frozen=True)
class StoredChunk:
    """A box of a logical tensor in a file: its start byte and the CRC-32 of its bytes."""

    box: Hyperrect
    file: str
    start: int
    checksum: int


@dataclass(frozen=True)
class StoredFile:
    """A file: its size, the size of its header (including the 8-byte length) and the header's CRC-32."""

    size: int
    header: int
    checksum: int


@dataclass(frozen=True)
class StoredTensor:
    """A logical tensor: its dtype (a name in `DTYPES`), its global shape and its chunks."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]

    def num_bytes(self, chunk: StoredChunk) -> int:
        """Return the size of a chunk in bytes."""
        return chunk.box.numel * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint without tensor values."""

    facts: Mapping[str, Any]
    files: Mapping[str, StoredFile]
    tensors: Mapping[str, StoredTensor]


def write_manifest(manifest: Manifest) -> str:
    """Return the manifest as JSON text that ends with its own digest."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "facts": manifest.facts,
        "files": {name: asdict(file) for name, file in sorted(manifest.files.items())},
        "tensors": {
            key: {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "pieces": [
                    [chunk.box.offset, chunk.box.shape, chunk.file, chunk.start, chunk.checksum]
                    for chunk in tensor.chunks
                ],
            }
            for key, tensor in sorted(manifest.tensors.items())
        },
    }
    return json.dumps({**content, "digest": _digest(content)}) + "\n"


def _digest(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint, without checking other files.

    Raises: FormatError when the folder is no complete checkpoint of this version.
    """
    path = folder / MANIFEST
    try:
        content = parse_json(read_input(path).decode("utf-8"))
    except FileNotFoundError:
        raise FormatError(_explain_absence(folder)) from None
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is no manifest of a checkpoint, or was cut off: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise FormatError(f"{path} is JSON but no manifest of a moeverify checkpoint")
    if content.get("version") != VERSION:
        raise FormatError(
            f"{path} has version {content.get('version')!r}, this moeverify reads {VERSION}; save the state again"
        )
    digest = content.pop("digest", None)
    if digest != _digest(content):
        raise FormatError(f"{path} is damaged: its digest does not fit its content")
    try:
        return _parse(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{path} does not hold a manifest: {type(error).__name__}: {error}") from None


def _explain_absence(folder: Path) -> str:
    if not folder.exists():
        return f"{folder} does not exist"
    if (folder / ".metadata").exists():
        return (
            f"{folder} is a checkpoint of plain torch.distributed.checkpoint, with a pickle in `.metadata` "
            f"that may run any code; it was not read. A checkpoint of moeverify holds {MANIFEST}"
        )
    return f"{folder} holds no {MANIFEST}: it is no checkpoint, or one whose save never ended"


def _parse(content: Mapping[str, Any]) -> Manifest:
    files = {name: StoredFile(**fields) for name, fields in content["files"].items()}
    for name in files:
        if Path(name).name != name:
            raise ValueError(f"file `{name}` lies outside of the checkpoint")
    tensors = {}
    for key, fields in content["tensors"].items():
        chunks = tuple(
            StoredChunk(Hyperrect(tuple(offset), tuple(shape)), file, start, checksum)
            for offset, shape, file, start, checksum in fields["pieces"]
        )
        tensors[key] = StoredTensor(fields["dtype"], tuple(fields["shape"]), chunks)
        for problem in _check_tensor(tensors[key], files):
            raise ValueError(f"tensor {key}: {problem}")
    facts = content["facts"]
    if not isinstance(facts, dict):
        raise TypeError("the facts are no mapping")
    return Manifest(facts, files, tensors)


def _check_tensor(tensor: StoredTensor, files: Mapping[str, StoredFile]) -> Iterator[str]:
    """Yield the problems of one tensor's entry: boxes out of bounds, unlisted files, incomplete coverage."""
    if tensor.dtype not in DTYPES:
        yield f"unknown dtype {tensor.dtype!r}"
        return
    for chunk in tensor.chunks:
        box = chunk.box
        if not len(box.offset) == len(box.shape) == len(tensor.shape) or any(
            offset < 0 or size < 0 or offset + size > whole
            for offset, size, whole in zip(box.offset, box.shape, tensor.shape, strict=True)
        ):
            yield f"a box {box.offset} {box.shape} outside of the shape {tensor.shape}"
        if chunk.file not in files:
            yield f"file {chunk.file!r} is not listed"
        elif not 0 <= chunk.start <= chunk.start + tensor.num_bytes(chunk) <= files[chunk.file].size:
            yield f"bytes outside of {chunk.file}"
    if sum(chunk.box.numel for chunk in tensor.chunks) != math.prod(tensor.shape):
        yield "its boxes do not cover it once"
