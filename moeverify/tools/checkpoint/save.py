"""Saving the state of all ranks as one checkpoint, synchronously or in the background."""

from __future__ import annotations

import secrets
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from moeverify.dtype_names import DTYPE_NAMES
from moeverify.errors import FormatError, MachineError
from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.seams import seam
from moeverify.tools.checkpoint.hyperrect import split_region
from moeverify.tools.checkpoint.manifest import MANIFEST
from moeverify.tools.checkpoint.writer import HeldBox, HyperrectPlanner, SafeWriter, remove_partial

BY_NAME = "by_name"
"""The fact that is the union of all ranks' mappings, for facts known only where a tensor is stored."""


def save(
    folder: Path,
    tensors: Sequence[LocalShard],
    facts: Mapping[str, Any],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Save tensors by their logical names, and facts (JSON), as the checkpoint `folder`.

    Shards with the same name on several ranks are parts or replicas of one logical tensor. One rank writes
    a box that several ranks hold. The folder appears when everything is on disk. It must not exist, so no
    checkpoint is ever overwritten. Collective: all ranks of `group`, by default all ranks.

        save(Path("step-4"), parameters(model), {"step": 4})
        facts = load(Path("step-4"), parameters(model))

    Raises: FormatError when `folder` exists; MachineError on every remaining rank when a rank could not
    write or was lost.
    """
    Saving(folder, tensors, facts, group).run()


def save_async(
    folder: Path,
    tensors: Sequence[LocalShard],
    facts: Mapping[str, Any],
    group: dist.ProcessGroup,
) -> Saving:
    """Copy all tensors to host memory and save them in the background; see `save`.

    When it returns, training may modify the tensors. `wait` on the result returns when the checkpoint
    exists. `group` must be a gloo group that is used for nothing else, because its collectives run in
    another thread. Collective: all ranks of `group`.

    Raises: FormatError when `folder` exists.
    """
    saving = Saving(folder, tensors, facts, group)
    saving.begin()
    return saving


class Saving:
    """One save of a checkpoint, from planning to the final rename."""

    def __init__(
        self,
        folder: Path,
        tensors: Sequence[LocalShard],
        facts: Mapping[str, Any],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.folder = folder.resolve()
        self._group = group
        partial, merged = self._agree(facts)
        self._partial = self.folder.with_name(partial)
        self._parts, self._state = list_parts(tensors)
        self._planner = HyperrectPlanner(self._parts)
        self._writer = SafeWriter(self.folder, self._partial, merged)
        self._future: Any = None

    def run(self) -> None:
        """Save in this thread."""
        self._guard(lambda: self._save(state_dict_saver.save))

    def begin(self) -> None:
        """Copy the tensors and save them in another thread."""
        self._future = self._save(state_dict_saver.async_save, async_stager=HostCopy())
        self._state = {}

    def wait(self) -> None:
        """Wait until the checkpoint exists.

        Raises: MachineError on every remaining rank when a rank could not write or was lost.
        """
        self._guard(self._future.result)

    def _save(self, how: Callable[..., Any], **rest: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            return how(
                dict(self._state),
                storage_writer=self._writer,
                planner=self._planner,
                process_group=self._group,
                **rest,
            )

    def _guard(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except CheckpointException as error:  # a BaseException, which most handlers would miss
            self._remove()
            rank, (cause, _) = min(error.failures.items())
            if isinstance(cause, KeyboardInterrupt):
                raise cause from None
            message = f"rank {rank} could not save to {self.folder}: {type(cause).__name__}: {cause}"
            raise MachineError(f"{message}; there is no such checkpoint, and none was changed") from cause
        except RuntimeError as error:
            if not dist.is_initialized():
                raise
            self._remove()
            first = str(error).partition("\n")[0]
            is_there = (self.folder / MANIFEST).is_file()
            state = "it is complete" if is_there else "there is no such checkpoint, and none was changed"
            raise MachineError(
                f"the ranks lost each other while {self.folder} was saved ({first}); {state}"
            ) from error
        except BaseException:
            self._remove()
            raise

    def _remove(self) -> None:
        if _rank(self._group) == 0:
            self._writer.cancel()
            shutil.rmtree(self._partial, ignore_errors=True)

    def _agree(self, facts: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the name of the partial folder and the merged facts, equal on every rank.

        Raises: FormatError when the folder exists.
        """
        mine = (f".{self.folder.name}.{secrets.token_hex(4)}.partial", dict(facts), self.folder.exists())
        shown = gather(mine, self._group)
        if any(exists for _, _, exists in shown):
            raise FormatError(f"{self.folder} is there already; a checkpoint is never written over")
        if _rank(self._group) == 0:
            remove_partial(self.folder)
        merged = dict(shown[0][1])
        by_name: dict[str, Any] = {}
        for _, other, _ in shown:
            by_name |= other.get(BY_NAME, {})
        return shown[0][0], {**merged, **({BY_NAME: by_name} if by_name else {})}


class HostCopy:
    """Torch's staging interface: one copy of all tensors in host memory."""

    should_synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of all tensors."""
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in state_dict.items()}

    def synchronize_staging(self) -> None:
        """Do nothing: `stage` returns after all copies are complete."""

    def close(self) -> None:
        """Do nothing: no resources are held."""


@seam
def list_parts(tensors: Sequence[LocalShard]) -> tuple[list[HeldBox], dict[str, Tensor]]:
    """Return the boxes that this rank holds, and their local tensors by number.

    Raises: TypeError for a dtype that a checkpoint cannot hold.
    """
    parts: list[HeldBox] = []
    state: dict[str, Tensor] = {}
    for shard in tensors:
        local = shard.local()
        if local.dtype not in DTYPE_NAMES:
            raise TypeError(f"{shard.name}: a checkpoint cannot hold {local.dtype}")
        for box, view in split_region(shard.region, local):
            state[str(len(parts))] = view
            parts.append(HeldBox(shard.name, shard.region.shape, box))
    return parts, state


def gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return every rank's value, in rank order. Collective: all ranks of `group`."""
    if not dist.is_initialized():
        return [value]
    shown: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(shown, value, group=group)
    return shown


def _rank(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0
