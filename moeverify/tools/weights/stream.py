"""Conversion of weights from one format to another, chunk by chunk, into a folder that appears whole."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from moeverify.errors import CaseError, MachineError, Problem
from moeverify.tools.weights.dcp import DcpSink, DcpSource
from moeverify.tools.weights.description import (
    Description,
    Kind,
    find_kind,
    read_description,
    write_description,
)
from moeverify.tools.weights.huggingface import create_huggingface, open_huggingface
from moeverify.tools.weights.megablocks import create_megablocks, open_megablocks
from moeverify.tools.weights.source import Buffer, Chunk, Sink, Spec, WeightSource, cut
from moeverify.tools.weights.tensor_mapping import list_tensors


@contextmanager
def make_folder(destination: Path) -> Iterator[Path]:
    """Yield a new temporary folder next to `destination`, and rename it to `destination` on success.

    After an error or an interrupt the temporary folder is removed. A killed process leaves a folder
    `.NAME.partial-PID`, which may be deleted.

    Raises: CaseError when `destination` is a file or a non-empty folder; MachineError when writing fails.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        remedy = "choose another destination, or remove it"
        raise CaseError([Problem("something is there already", file=str(destination), remedy=remedy)])
    partial = destination.absolute().with_name(f".{destination.absolute().name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        yield partial
        _sync(partial)
        partial.rename(destination.absolute())
        _sync(destination.absolute().parent)
    except OSError as error:
        raise MachineError(f"{destination} was not written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_room(destination: Path, num_bytes: int) -> None:
    """Check that the disk has room for `num_bytes`.

    Raises: MachineError when it does not.
    """
    parent = destination.absolute().parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        gigabytes = f"{num_bytes / 1e9:.1f} GB are needed there, and {free / 1e9:.1f} GB are free"
        raise MachineError(f"{destination} was not written: {gigabytes}")


def _sync(folder: Path) -> None:
    """Sync a folder's entries and the contents of its JSON files to disk."""
    for path in [*folder.glob("*.json"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


SHARD_BYTES = 5 * 10**9

Progress = Callable[[str, int, int], None]
"""Progress callback: name of the tensor being read, bytes done, total bytes."""


@dataclass(frozen=True)
class Conversion:
    """Summary of a conversion."""

    source_kind: Kind
    num_tensors: int
    num_bytes: int
    num_files: int


def open_source(folder: Path, described: Description | None = None, drop: Sequence[str] = ()) -> WeightSource:
    """Return the weights of a folder in any format.

    `described` is needed only if the folder does not describe the model.

    Raises: FormatError with the file and the key.
    """
    kind = find_kind(folder)
    described = described or read_description(folder)
    if kind == "dcp":
        return DcpSource(folder, list_tensors(described.model), drop)
    return (open_megablocks if kind == "megablocks" else open_huggingface)(folder, described, drop)


def convert(
    source: Path,
    destination: Path,
    to: Kind,
    *,
    described: Description | None = None,
    drop: Sequence[str] = (),
    shard_bytes: int = SHARD_BYTES,
    on_progress: Progress = lambda name, done, total: None,
) -> Conversion:
    """Convert the weights of the folder `source` exactly to another format in the folder `destination`.

    Memory holds about one chunk of 64 MiB at a time, or one expert's matrix if that is larger. A stored
    tensor of a distributed checkpoint from another program is read whole. The destination appears only when
    it is complete.

    Raises: FormatError with the file and key of a problem in the source; CaseError when the destination
    exists; MachineError when writing fails.
    """
    kind = find_kind(source)
    described = described or read_description(source)
    weights = open_source(source, described, drop)
    chunks = cut(weights.specs)
    buffer = Buffer(chunks)
    total = sum(spec.num_bytes for spec in weights.specs.values())
    done = 0

    def read(chunk: Chunk) -> Tensor:
        nonlocal done
        on_progress(chunk.name, done, total)
        values = weights.read(chunk.name, chunk.box, buffer.place(chunk))
        done += chunk.num_bytes
        return values

    with make_folder(destination) as folder:
        check_room(destination, total)
        write_description(folder, to, described, _name_dtype(weights.specs))
        _create(folder, to, described, weights.specs, shard_bytes).write(chunks, read)
        num_files = sum(path.suffix in {".safetensors", ".distcp"} for path in folder.iterdir())
        on_progress("", done, total)
    return Conversion(kind, len(weights.specs), total, num_files)


def _create(
    folder: Path, kind: Kind, described: Description, specs: Mapping[str, Spec], shard_bytes: int
) -> Sink:
    if kind == "dcp":
        return DcpSink(folder)
    create = create_megablocks if kind == "megablocks" else create_huggingface
    return create(folder, described, specs, shard_bytes)


def _name_dtype(specs: Mapping[str, Spec]) -> str:
    """Return the most frequent dtype of the tensors, as config.json names it."""
    [(dtype, _)] = Counter(spec.dtype for spec in specs.values()).most_common(1)
    return str(dtype).removeprefix("torch.")
