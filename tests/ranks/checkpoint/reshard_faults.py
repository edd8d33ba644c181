"""What goes wrong with a checkpoint on real ranks; called on every rank before it saves or loads."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_plain

from moeverify.checkpoint import save as saving
from moeverify.checkpoint import writer
from moeverify.errors import FormatError
from moeverify.layout.local_shard import LocalShard
from moeverify.layout.region import Region
from moeverify.train.state import TrainingState
from moeverify.worker import reshard as resharding

DATA = "rank-00001.safetensors"


def write_late() -> None:
    """Write what is saved in the background when training is over, as a slow disk would."""
    is_over = threading.Event()
    write, wait = writer.write_boxes, saving.Saving.wait

    def write_boxes(*args: Any) -> Any:
        assert is_over.wait(100)
        return write(*args)

    def wait_for(self: saving.Saving) -> None:
        is_over.set()
        wait(self)

    writer.write_boxes = write_boxes
    saving.Saving.wait = wait_for  # type: ignore[method-assign]


def leak() -> None:
    """Write late what training goes on to change."""
    write_late()
    saving.HostCopy.stage = lambda self, state_dict: state_dict  # type: ignore[method-assign]


def forget_options() -> None:
    """Leave the groups of the optimizer as they are."""
    TrainingState._restore_groups = lambda self, by_name: None  # type: ignore[method-assign]


def forget_decay() -> None:
    """Leave the weight decay of each group as it is."""
    original = TrainingState._restore_groups

    def restore(self: TrainingState, by_name: Mapping[str, Mapping[str, Any]]) -> None:
        kept = [group["weight_decay"] for group in self.optimizer.param_groups]
        original(self, by_name)
        for group, decay in zip(self.optimizer.param_groups, kept, strict=True):
            group["weight_decay"] = decay

    TrainingState._restore_groups = restore  # type: ignore[method-assign]


def forget_generators() -> None:
    """Leave the random generators as they are."""
    resharding.write_generators = lambda states, device: None


def exchange_experts() -> None:
    """Load the first two experts of each stack into each other's place."""
    original = resharding.resume

    def resume(state: TrainingState, *args: Any) -> Any:
        found = original(state, *args)
        for held in state.tensors():
            if held.name.startswith("weight/") and ".experts." in held.name and len(held.local()) > 1:
                local = held.local()
                local[:2] = local[:2].flip(0).clone()
        return found

    resharding.resume = resume


def _guard_state() -> None:
    """Let a load that refuses show whether it has changed anything before."""
    original = resharding.resume

    def resume(state: TrainingState, *args: Any) -> Any:
        before = [(held.name, held.local().clone()) for held in state.tensors()]
        numbers = state.numbers()
        try:
            return original(state, *args)
        except FormatError:
            now = {held.name: held.local() for held in state.tensors()}
            assert all(torch.equal(now[name], local) for name, local in before), "half loaded"
            assert state.numbers() == numbers, "half restored"
            raise

    resharding.resume = resume


def _change_after_save(change: Callable[[Path], object]) -> None:
    original = resharding.save

    def save(folder: Path, *args: Any) -> None:
        original(folder, *args)
        if dist.get_rank() == 0:
            change(folder)
        dist.barrier()

    resharding.save = save
    _guard_state()


def flip_a_bit() -> None:
    """Change one bit of the last value in the file of rank 1."""

    def change(folder: Path) -> None:
        content = bytearray((folder / DATA).read_bytes())
        content[-1] ^= 1
        (folder / DATA).write_bytes(content)

    _change_after_save(change)


def cut_off() -> None:
    """Take the last bytes of the file of rank 1."""
    _change_after_save(lambda folder: (folder / DATA).write_bytes((folder / DATA).read_bytes()[:-100]))


def remove_file() -> None:
    """Take the whole file of rank 1."""
    _change_after_save(lambda folder: (folder / DATA).unlink())


def remove_manifest() -> None:
    """Leave a folder as an older tool would that writes its files in place and was killed."""
    _change_after_save(lambda folder: (folder / "checkpoint.json").unlink())


def put_foreign() -> None:
    """Put a checkpoint of torch alone in its place, with a pickle."""

    def change(folder: Path) -> None:
        shutil.rmtree(folder)
        save_plain({"w": torch.ones(2)}, storage_writer=FileSystemWriter(folder), no_dist=True)

    _change_after_save(change)


def _save_other(change: Callable[[Sequence[LocalShard]], list[LocalShard]]) -> None:
    original = resharding.save

    def save(folder: Path, tensors: Sequence[LocalShard], *args: Any) -> None:
        original(folder, change(tensors), *args)

    resharding.save = save
    _guard_state()


def lose_a_key() -> None:
    """Save everything but one bias."""
    _save_other(lambda tensors: [held for held in tensors if held.name != "weight/layers.1.moe.router.bias"])


def save_another_shape() -> None:
    """Save a norm that is longer by one."""

    def change(tensors: Sequence[LocalShard]) -> list[LocalShard]:
        longer = LocalShard("weight/norm.weight", torch.ones(33, dtype=torch.float64), Region.whole((33,)))
        return [longer if held.name == longer.name else held for held in tensors]

    _save_other(change)


def save_of_another_recipe() -> None:
    """Say that the state is that of another recipe."""
    original = resharding.save

    def save(folder: Path, tensors: Sequence[LocalShard], facts: Mapping[str, Any]) -> None:
        original(folder, tensors, {**facts, "recipe": "0123456789abcdef"})

    resharding.save = save
    _guard_state()
