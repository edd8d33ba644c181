"""Full tensors of a golden on disk, written once by one device and read slice by slice by every rank.

A stored golden is a folder. `step<N>.safetensors` has the tensors of one step under `kind/name`.
`golden.json` has the noise of one device and is written last: a folder without it is not a golden. It has
checksums of every file and of itself (`moeverify.checksum`).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moeverify.checksum import checksum_file, seal
from moeverify.errors import FormatError
from moeverify.input_file import read_input
from moeverify.json_file import JsonFile
from moeverify.parallel.regions.region import Region
from moeverify.parallel.regions.sketch import MOMENTS
from moeverify.stale_folders import hold, release, remove_abandoned
from moeverify.verification.golden.mapped import MappedFile

_INDEX = "golden.json"
_PLACES = "places"
_VERSION = 8
_MOST_WAITS, _WAIT = 20, 0.1  # seconds each
_FIELDS = {"version", "noise", "summary", "own_results", "dtypes", "files", "sketches"}


OwnResult = tuple[str, str, str]
"""(check, kind, name) of a result for which a user's own step on one device differs from the recipe."""

Dtypes = Mapping[tuple[str, str, str], str]
"""Dtypes of one device in the recipe's precision, by (use, parameter or module, further detail)."""


def tensor_key(kind: str, name: str) -> str:
    """Return the key of a logical tensor in the file of its step."""
    return f"{kind}/{name}"


class GoldenWriter:
    """An observer that assembles the shards of one device's run and writes each step when it is complete.

    Use it as a context manager around the run. `finish` renames the folder to its final name. If the run
    ends before that, nothing remains on disk.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
        self._step: int | None = None
        self._tensors: dict[str, Tensor] = {}
        self._held = ExitStack()
        self._older: tuple[int, int] | None = None

    def __enter__(self) -> GoldenWriter:
        """Create the folder to write into."""
        self._older = _identify(self.folder)
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        self._held.enter_context(hold(self._partial))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove an unfinished folder."""
        self._held.close()
        shutil.rmtree(self._partial, ignore_errors=True)

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Add one shard of a logical tensor; see `moeverify.parallel.regions.observer.Observer`.

        A shard of None is stored as zeros in float64.
        """
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
        """Do nothing, because each observation names its step."""

    def flush(self) -> Path:
        """Write the last step and return the folder with all steps, before its final rename."""
        self._flush()
        return self._partial

    def narrow(self) -> None:
        """Convert all float64 tensors of more than one element to float32, in every step.

        For runs whose own rounding is far larger than the rounding of float32. It halves the data that is
        read beside a training.
        """
        self._flush()
        for path in self._partial.glob("step*.safetensors"):
            tensors = {key: _narrow(tensor) for key, tensor in load_file(path).items()}
            narrowed = path.with_suffix(".narrow")
            save_file(tensors, narrowed)
            narrowed.replace(path)

    def put(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors of a step, by `tensor_key`."""
        kept = {key: tensor.contiguous() for key, tensor in tensors.items()}
        save_file(kept, self._partial / f"step{step}.safetensors")

    def finish(
        self,
        noise: dict[str, float],
        summary: dict[str, Any],
        own_results: Collection[OwnResult] = (),
        dtypes: Dtypes | None = None,
        sketches: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Write the index and rename the folder to its final name, replacing an older golden.

        `sketches` maps the `tensor_key` of each sketched tensor to its logical shape; None in a golden of
        whole tensors. If another process has finished the same golden in the meantime, its folder remains,
        because that process reads it.

        Raises: OSError when the folder cannot be written or renamed.
        """
        self._flush()
        files = {path.name: checksum_file(path) for path in sorted(self._partial.glob("step*.safetensors"))}
        content = {
            "version": _VERSION,
            "noise": noise,
            "summary": summary,
            "own_results": sorted(own_results),
            "dtypes": sorted([*key, dtype] for key, dtype in (dtypes or {}).items()),
            "files": files,
            "sketches": None if sketches is None else {key: list(sketches[key]) for key in sorted(sketches)},
        }
        (self._partial / _INDEX).write_text(seal(json.dumps(content, sort_keys=True)))
        release(self._partial)
        if is_stored(self.folder) and _identify(self.folder) != self._older:
            return
        if self.folder.exists():
            retired = self.folder.with_name(f"{self.folder.name}.{os.getpid()}.retired")
            self.folder.rename(retired)
            shutil.rmtree(retired, ignore_errors=True)
        try:
            self._partial.rename(self.folder)
        except OSError:
            if not is_stored(self.folder):  # otherwise another process finished the same golden first
                raise

    def _flush(self) -> None:
        if self._step is not None and self._tensors:
            self.put(self._step, self._tensors)
        self._tensors = {}


def _identify(folder: Path) -> tuple[int, int] | None:
    """Return an identifier that differs for a later folder of the same name, or None without a folder."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _narrow(tensor: Tensor) -> Tensor:
    wide = tensor.dtype is torch.float64 and tensor.numel() > 1
    return tensor.to(torch.float32) if wide else tensor


def note_places(golden: Path, places: Sequence[str]) -> None:
    """Write the folders of the user's code into the folder of a golden; see `sweep`."""
    (golden / _PLACES).write_text("\n".join(places), encoding="utf-8")


def sweep(cache: Path) -> None:
    """Remove goldens of user code that is gone, and unfinished folders of killed processes, from a cache."""
    gone = (each.parent for each in cache.glob(f"*/{_PLACES}") if not _has_places(each))
    for retired in (*cache.glob("*.retired"), *gone):
        shutil.rmtree(retired, ignore_errors=True)
    remove_abandoned(cache.glob("*.partial"))


def _has_places(noted: Path) -> bool:
    try:
        return all(Path(place).exists() for place in read_input(noted).decode().split("\n"))
    except (OSError, ValueError):  # another command has removed it, or it is damaged
        return True


def is_stored(folder: Path) -> bool:
    """Return whether the folder holds a complete golden."""
    return (folder / _INDEX).is_file()


class StoredGolden:
    """Reads slices of a stored golden. Files stay mapped, so a rank reads only the pages that it compares.

    `finished` False opens a folder without an index, which has no noise, summary or checksums.

    Raises: FormatError when a file is missing, truncated or of another version.
    """

    def __init__(self, folder: Path, *, finished: bool = True) -> None:
        self.folder = folder
        self._files: dict[int, MappedFile] = {}
        self.noise: dict[str, float] = {}
        self.summary: dict[str, Any] = {}
        self.own_results: frozenset[OwnResult] = frozenset()
        self.dtypes: Dtypes = {}
        self.is_sketched = False
        self.sketches: dict[str, tuple[int, ...]] = {}
        self._checksums: dict[str, int] = {}
        if finished:
            content = _read_index(folder / _INDEX)
            self.noise, self.summary = content["noise"], content["summary"]
            self.own_results = frozenset((check, kind, name) for check, kind, name in content["own_results"])
            self.dtypes = {(use, name, how): dtype for use, name, how, dtype in content["dtypes"]}
            self._checksums = content["files"]
            self.is_sketched = content["sketches"] is not None
            self.sketches = {key: tuple(shape) for key, shape in (content["sketches"] or {}).items()}

    def verify(self, steps: Sequence[int]) -> None:
        """Compare the checksum of every file of these steps.

        Raises: FormatError when a file is missing or damaged.
        """
        for step in steps:
            path = self.folder / f"step{step}.safetensors"
            try:
                is_whole = checksum_file(path) == self._checksums.get(path.name)
            except OSError as error:
                raise FormatError(f"{path} cannot be read: {error.strerror or error}") from error
            if not is_whole:
                raise FormatError(f"{path}: damaged, its checksum is another")

    def keys(self, step: int) -> list[str]:
        """Return the keys of a step."""
        return self._file(step).keys()

    def whole(self, step: int, key: str) -> Tensor:
        """Return a whole logical tensor by its key."""
        return self._file(step).whole(key)

    def read(self, step: int, kind: str, name: str, region: Region) -> Tensor | None:
        """Return a region (`region.local_shape`) of a tensor on the CPU; None if the golden has no values of it.

        A box that exceeds the stored tensor, such as one with more choices of experts, has no values either.
        """
        file, key = self._file(step), tensor_key(kind, name)
        if key not in file or key in self.sketches:
            return None
        if region.flat is None and all(isinstance(indices, range) for indices in region.dims):
            box = cast(tuple[range, ...], region.dims)
            return file.box(key, box) if file.has_box(key, box) else None
        return region.take(file.whole(key))

    def find(self, step: int, kind: str, name: str) -> Tensor | None:
        """Return a whole tensor on the CPU, or None if the golden does not store its values."""
        key = tensor_key(kind, name)
        return self.whole(step, key) if key in self._file(step) and key not in self.sketches else None

    def norm(self, step: int, key: str) -> float:
        """Return the Frobenius norm of a logical tensor by its key."""
        stored = self.whole(step, key).to(torch.float64)
        if key in self.sketches:
            return math.sqrt(stored[:, MOMENTS.index("square")].sum().item())
        return float(stored.norm())

    def sketch(self, step: int, kind: str, name: str) -> Tensor | None:
        """Return the sketch of a logical tensor, or None; see `moeverify.verification.golden.sketched`."""
        key = tensor_key(kind, name)
        return self.whole(step, key) if key in self.sketches and key in self._file(step) else None

    def _file(self, step: int) -> MappedFile:
        if step not in self._files:
            try:
                self._files[step] = _map(self.folder / f"step{step}.safetensors")
            except FormatError as error:
                raise FormatError(f"{error}, as part of a golden; delete {self.folder}") from error
        return self._files[step]


def _map(path: Path) -> MappedFile:
    """Map a file. If it is missing, wait until a process that replaces the golden has renamed its folder."""
    for _ in range(_MOST_WAITS):
        try:
            return MappedFile(path)
        except (FormatError, FileNotFoundError) as error:
            if not any(isinstance(each, FileNotFoundError) for each in (error, error.__cause__)):
                raise
        time.sleep(_WAIT)
    return MappedFile(path)


def _read_index(path: Path) -> dict[str, Any]:
    file = JsonFile.read(path, "delete the folder, it is made again", finite=False)
    content = file.get_object()
    if content.get("version") != _VERSION or content.keys() != _FIELDS:
        file.refuse("not a golden of this version")
    file.require_seal()
    return content
