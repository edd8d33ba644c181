"""Full tensors of a golden on disk, written once by one device and read slice by slice by every rank.

A stored golden is a folder: `step<N>.safetensors` with the tensors of one step under `kind/name`, and
`golden.json` with the noise that one device showed, written last: a folder without it is not a golden.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moeverify.errors import FormatError
from moeverify.golden.mapped import MappedFile
from moeverify.layout.region import Region

_INDEX = "golden.json"
_VERSION = 2


def tensor_key(kind: str, name: str) -> str:
    """Return the key under which a logical tensor stands in the file of its step."""
    return f"{kind}/{name}"


class GoldenWriter:
    """An observer that assembles the shards of one device's run and writes each step when it is complete.

    Used as a context manager around the run. The folder appears under its final name by one rename, after
    `finish`; whatever ends the run before leaves nothing behind.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
        self._step: int | None = None
        self._tensors: dict[str, Tensor] = {}

    def __enter__(self) -> GoldenWriter:
        """Make the folder to write into."""
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove what was not finished."""
        shutil.rmtree(self._partial, ignore_errors=True)

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Take one shard of a logical tensor; see `moeverify.layout.observer.Observer`."""
        if self._step is not None and step != self._step:
            self._flush()
        self._step = step
        if local is None:
            local = torch.zeros(region.local_shape, dtype=torch.float64)
        key = tensor_key(kind, name)
        if region.is_whole:
            self._tensors[key] = local.detach().to("cpu", copy=True).reshape(region.shape)
            return
        if key not in self._tensors:
            self._tensors[key] = torch.zeros(region.shape, dtype=local.dtype)
        region.put(self._tensors[key], local.detach().cpu())

    def begin_step(self, step: int) -> None:
        """Do nothing: what is observed says its step."""

    def flush(self) -> Path:
        """Write the last step and return the folder with all steps, not yet under its final name."""
        self._flush()
        return self._partial

    def narrow(self) -> None:
        """Keep float32 in place of float64 of all tensors that are no single numbers, in every step.

        For runs whose own rounding is far above that of float32: half as much is read beside a training then.
        """
        self._flush()
        for path in self._partial.glob("step*.safetensors"):
            tensors = {key: _narrow(tensor) for key, tensor in load_file(path).items()}
            narrowed = path.with_suffix(".narrow")
            save_file(tensors, narrowed)
            narrowed.replace(path)

    def finish(self, noise: dict[str, float], summary: dict[str, Any]) -> None:
        """Write the index and give the folder its final name, replacing an older golden."""
        self._flush()
        content = {"version": _VERSION, "noise": noise, "summary": summary}
        (self._partial / _INDEX).write_text(json.dumps(content, sort_keys=True))
        if self.folder.exists():
            retired = self.folder.with_name(f"{self.folder.name}.{os.getpid()}.retired")
            self.folder.rename(retired)
            shutil.rmtree(retired, ignore_errors=True)
        try:
            self._partial.rename(self.folder)
        except OSError:
            if not is_stored(self.folder):  # else another process finished the same golden first
                raise

    def _flush(self) -> None:
        if self._step is not None and self._tensors:
            tensors = {key: tensor.contiguous() for key, tensor in self._tensors.items()}
            save_file(tensors, self._partial / f"step{self._step}.safetensors")
        self._tensors = {}


def _narrow(tensor: Tensor) -> Tensor:
    wide = tensor.dtype is torch.float64 and tensor.numel() > 1
    return tensor.to(torch.float32) if wide else tensor


def is_stored(folder: Path) -> bool:
    """Return whether the folder holds a complete golden."""
    return (folder / _INDEX).is_file()


class StoredGolden:
    """Reads slices of a stored golden; files stay mapped, so a rank touches only the pages it compares.

    Raises: FormatError where a file is missing, truncated or of another version.
    """

    def __init__(self, folder: Path, *, finished: bool = True) -> None:
        self.folder = folder
        self._files: dict[int, MappedFile] = {}
        self.noise: dict[str, float] = {}
        self.summary: dict[str, Any] = {}
        if finished:
            content = _read_index(folder / _INDEX)
            self.noise, self.summary = content["noise"], content["summary"]

    def keys(self, step: int) -> list[str]:
        """Return the keys of a step."""
        return self._file(step).keys()

    def whole(self, step: int, key: str) -> Tensor:
        """Return a whole logical tensor by its key."""
        return self._file(step).whole(key)

    def read(self, step: int, kind: str, name: str, region: Region) -> Tensor | None:
        """Return a region of a logical tensor, or None where the golden has no such tensor."""
        file, key = self._file(step), tensor_key(kind, name)
        if key not in file:
            return None
        if region.flat is None and all(isinstance(indices, range) for indices in region.dims):
            return file.box(key, cast(tuple[range, ...], region.dims))
        return region.take(file.whole(key))

    def _file(self, step: int) -> MappedFile:
        if step not in self._files:
            try:
                self._files[step] = MappedFile(self.folder / f"step{step}.safetensors")
            except FormatError as error:
                raise FormatError(f"{error}, as part of a golden; delete {self.folder}") from error
        return self._files[step]


def _read_index(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise FormatError(
            f"{path}: not a readable golden ({error}); delete the folder, it is made again"
        ) from error
    if not isinstance(content, dict) or content.keys() != {"version", "noise", "summary"}:
        raise FormatError(f"{path}: not a golden; delete the folder, it is made again")
    if content["version"] != _VERSION:
        raise FormatError(f"{path}: a golden of another version; delete the folder, it is made again")
    return content
