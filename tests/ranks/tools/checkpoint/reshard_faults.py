"""Faults of checkpoints on real ranks; called on every rank before it saves or loads."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_plain

from moeverify.errors import FormatError
from moeverify.faults.patch import Original, Patch
from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.parallel.regions.region import Region
from moeverify.tools.checkpoint.save import HostCopy, Saving, save
from moeverify.tools.checkpoint.writer import write_boxes
from moeverify.train.loop import train_step
from moeverify.train.random import write_generators
from moeverify.train.routing import update_selection_bias
from moeverify.train.state import TrainingState
from moeverify.verification.worker.reshard import resume

DATA = "rank-00001.safetensors"


def write_late(patch: Patch) -> None:
    """Write the background save only after training is over, as a slow disk would."""
    is_over = threading.Event()

    @patch.wrap(write_boxes)
    def write_at_the_end(original: Original[Any], *arguments: Any, **named: Any) -> Any:
        assert is_over.wait(100)
        return original(*arguments, **named)

    @patch.wrap(Saving.wait)
    def let_write(original: Original[None], self: Saving) -> None:
        is_over.set()
        original(self)


def leak(patch: Patch) -> None:
    """Write late, with the values that training changes meanwhile."""
    write_late(patch)
    patch.replace(HostCopy.stage)(lambda self, state_dict: state_dict)


def forget_options(patch: Patch) -> None:
    """Do not restore the options of the optimizer's groups."""
    patch.replace(TrainingState.restore_groups)(lambda self, by_name: None)


def forget_decay(patch: Patch) -> None:
    """Do not restore the weight decay of each group."""

    @patch.wrap(TrainingState.restore_groups)
    def restore(
        original: Original[None], self: TrainingState, by_name: Mapping[str, Mapping[str, Any]]
    ) -> None:
        kept = [group["weight_decay"] for group in self.optimizer.param_groups]
        original(self, by_name)
        for group, decay in zip(self.optimizer.param_groups, kept, strict=True):
            group["weight_decay"] = decay


def forget_generators(patch: Patch) -> None:
    """Do not restore the random generators."""
    patch.replace(write_generators)(lambda states, device: None)


def exchange_experts(patch: Patch) -> None:
    """Swap the first two experts of each stack when loading."""

    @patch.wrap(resume)
    def resume_exchanged(original: Original[Any], state: TrainingState, *arguments: Any, **named: Any) -> Any:
        found = original(state, *arguments, **named)
        for shard in state.tensors():
            local = shard.local()
            if shard.name.startswith("weight/") and ".experts." in shard.name and len(local) > 1:
                local[:2] = local[:2].flip(0).clone()
        return found


def rebind_bias(patch: Patch) -> None:
    """Bind each router's selection bias to a new tensor with the right values during a step."""

    @patch.wrap(update_selection_bias)
    def update(original: Original[None], moe: Any, program: Any, *arguments: Any) -> None:
        for router in program.routers:
            router.module.selection_bias = router.module.selection_bias.clone()
        original(moe, program, *arguments)


def rebind_norm(patch: Patch) -> None:
    """Bind the last norm's weight to a new parameter at the start of a step, before the forward pass."""

    @patch.wrap(train_step)
    def step(original: Original[None], state: TrainingState, *arguments: Any, **named: Any) -> None:
        norm = state.program.model.norm
        norm.weight = nn.Parameter(norm.weight.detach().clone())
        original(state, *arguments, **named)


def _guard_state(patch: Patch) -> None:
    """Report whether a refused load has changed anything."""

    @patch.wrap(resume)
    def resume_guarded(original: Original[Any], state: TrainingState, *arguments: Any, **named: Any) -> Any:
        before = [(shard.name, shard.local().clone()) for shard in state.tensors()]
        numbers = state.numbers()
        try:
            return original(state, *arguments, **named)
        except FormatError:
            now = {shard.name: shard.local() for shard in state.tensors()}
            assert all(torch.equal(now[name], local) for name, local in before), "half loaded"
            assert state.numbers() == numbers, "half restored"
            raise


def _change_after_save(patch: Patch, change: Callable[[Path], object]) -> None:
    @patch.wrap(save)
    def save_and_change(original: Original[None], folder: Path, *arguments: Any, **named: Any) -> None:
        original(folder, *arguments, **named)
        if dist.get_rank() == 0:
            change(folder)
        dist.barrier()

    _guard_state(patch)


def flip_a_bit(patch: Patch) -> None:
    """Flip one bit of the last value in the file of rank 1."""

    def change(folder: Path) -> None:
        content = bytearray((folder / DATA).read_bytes())
        content[-1] ^= 1
        (folder / DATA).write_bytes(content)

    _change_after_save(patch, change)


def cut_off(patch: Patch) -> None:
    """Remove the last bytes of the file of rank 1."""
    _change_after_save(patch, lambda folder: (folder / DATA).write_bytes((folder / DATA).read_bytes()[:-100]))


def remove_file(patch: Patch) -> None:
    """Remove the whole file of rank 1."""
    _change_after_save(patch, lambda folder: (folder / DATA).unlink())


def remove_manifest(patch: Patch) -> None:
    """Leave a folder like that of an older tool that writes files in place and was killed."""
    _change_after_save(patch, lambda folder: (folder / "checkpoint.json").unlink())


def put_plain_checkpoint(patch: Patch) -> None:
    """Replace the checkpoint with one of torch alone, which has a pickle."""

    def change(folder: Path) -> None:
        shutil.rmtree(folder)
        save_plain({"w": torch.ones(2)}, storage_writer=FileSystemWriter(folder), no_dist=True)

    _change_after_save(patch, change)


def _save_other(patch: Patch, change: Callable[[Sequence[LocalShard]], list[LocalShard]]) -> None:
    @patch.wrap(save)
    def save_changed(
        original: Original[None], folder: Path, tensors: Sequence[LocalShard], *arguments: Any, **named: Any
    ) -> None:
        original(folder, change(tensors), *arguments, **named)

    _guard_state(patch)


def lose_a_key(patch: Patch) -> None:
    """Save everything except one bias."""
    _save_other(
        patch,
        lambda tensors: [shard for shard in tensors if shard.name != "weight/layers.1.moe.router.bias"],
    )


def save_another_shape(patch: Patch) -> None:
    """Save a norm that is longer by one element."""

    def change(tensors: Sequence[LocalShard]) -> list[LocalShard]:
        longer = LocalShard("weight/norm.weight", torch.ones(33, dtype=torch.float64), Region.whole((33,)))
        return [longer if shard.name == longer.name else shard for shard in tensors]

    _save_other(patch, change)


def save_of_another_recipe(patch: Patch) -> None:
    """Label the saved state with another recipe."""

    @patch.wrap(save)
    def save_renamed(
        original: Original[None],
        folder: Path,
        tensors: Sequence[LocalShard],
        facts: Mapping[str, Any],
        *arguments: Any,
        **named: Any,
    ) -> None:
        original(folder, tensors, {**facts, "recipe": "0123456789abcdef"}, *arguments, **named)

    _guard_state(patch)
