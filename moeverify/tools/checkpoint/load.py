"""Loading of a checkpoint into existing tensors, under any layout, with all checks before any change."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException

from moeverify.dtype_names import DTYPE_NAMES
from moeverify.errors import FormatError
from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.seams import seam
from moeverify.tools.checkpoint.manifest import Manifest, read_manifest
from moeverify.tools.checkpoint.reader import HyperrectLoadPlanner, SafeReader, check_files
from moeverify.tools.checkpoint.save import gather, list_parts

RECIPE = "recipe"
"""The fact with the fingerprint of the recipe that a state belongs to."""


def read_facts(folder: Path) -> Mapping[str, Any]:
    """Return the facts of a checkpoint. Not collective.

    Raises: FormatError when the folder is no complete checkpoint.
    """
    return read_manifest(folder).facts


def load(
    folder: Path,
    tensors: Sequence[LocalShard],
    *,
    recipe: str | None = None,
    optional: str | None = None,
    group: dist.ProcessGroup | None = None,
) -> Mapping[str, Any]:
    """Fill tensors with the checkpoint's values of the same names, and return its facts.

    Each rank reads its own parts; the ranks share the verification of file checksums. All ranks check
    everything first. If one finds a problem, all ranks raise and no tensor has changed. Checkpoint keys
    that no rank requests are an error too, unless they begin with `optional`. Collective: all ranks of
    `group`, by default all ranks.

    Raises: FormatError, with the file and the key, when
    - the folder is no complete checkpoint;
    - a file is missing, truncated or damaged;
    - a key is missing or superfluous;
    - a shape or dtype does not fit;
    - the state belongs to another recipe.
    """
    folder = folder.resolve()
    parts, state = list_parts(tensors)
    manifest, problem = _examine(folder, tensors, recipe, group)
    shown = gather((problem, [shard.name for shard in tensors]), group)
    _raise_first([text for text, _ in shown])
    assert manifest is not None
    unasked = manifest.tensors.keys() - {name for _, names in shown for name in names}
    refuse(folder, [key for key in unasked if optional is None or not key.startswith(optional)])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            state_dict_loader.load(
                {},
                storage_reader=SafeReader(folder, manifest),
                planner=HyperrectLoadPlanner(parts, state),
                process_group=group,
            )
        except CheckpointException as error:  # a BaseException, which most handlers would miss
            rank, (cause, _) = min(error.failures.items())
            raise FormatError(
                f"rank {rank} could not read {folder}: {type(cause).__name__}: {cause}"
            ) from cause
    return manifest.facts


def _examine(
    folder: Path, tensors: Sequence[LocalShard], recipe: str | None, group: dist.ProcessGroup | None
) -> tuple[Manifest | None, str]:
    """Return the manifest, and the first problem of the checkpoint or of this rank's request."""
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
    try:
        manifest = read_manifest(folder)
        saved = manifest.facts.get(RECIPE)
        if recipe is not None and saved != recipe:
            raise FormatError(f"{folder} is the state of recipe {saved}, and this run's is {recipe}")
        _raise_first(list(find_misfits(folder, manifest, tensors)))
        check_files(folder, manifest, rank, size)
    except FormatError as error:
        return None, str(error)
    return manifest, ""


@seam
def find_misfits(folder: Path, manifest: Manifest, tensors: Sequence[LocalShard]) -> Iterator[str]:
    """Yield the problems of the requested tensors: not saved, or saved with another shape or dtype."""
    for shard in tensors:
        known = manifest.tensors.get(shard.name)
        if known is None:
            yield f"{folder} has no `{shard.name}`"
            continue
        dtype = DTYPE_NAMES[shard.local().dtype]
        if known.shape != shard.region.shape:
            yield f"{folder}: `{shard.name}` has shape {list(known.shape)}, and {list(shard.region.shape)} is wanted"
        elif known.dtype != dtype:
            yield f"{folder}: `{shard.name}` is {known.dtype}, and {dtype} is wanted"


@seam
def refuse(folder: Path, superfluous: Sequence[str]) -> None:
    """Raise FormatError when the checkpoint has tensors that the model does not have."""
    if superfluous:
        more = f" and {len(superfluous) - 1} more" if len(superfluous) > 1 else ""
        raise FormatError(f"{folder} has `{min(superfluous)}`{more}, which this model has not")


def _raise_first(problems: Sequence[str]) -> None:
    found = [text for text in problems if text]
    if found:
        more = f" (and {len(found) - 1} more)" if len(set(found)) > 1 else ""
        raise FormatError(found[0] + more)
