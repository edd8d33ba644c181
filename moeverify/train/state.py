"""The state that training steps change, as logical tensors and plain values: the content of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from moeverify.cases.schema import Recipe
from moeverify.errors import FormatError
from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.seams import seam
from moeverify.train.optimizer import optimizer_state
from moeverify.train.program import TrainingProgram
from moeverify.train.schedule import build_schedule

# Optimizer options that select an implementation. They belong to the layout and are not saved.
_IMPLEMENTATION = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})


@dataclass
class TrainingState:
    """A program during its training.

    `step` is the next optimizer step and `position` the next batch of the data. They are equal in an
    uninterrupted run.
    """

    recipe: Recipe
    program: TrainingProgram
    optimizer: Optimizer
    schedule: LambdaLR
    step: int = 0
    position: int = 0

    @classmethod
    def begin(cls, recipe: Recipe, program: TrainingProgram) -> TrainingState:
        """Return the state before the first step."""
        optimizer = program.engine.begin(recipe.optimizer, program.shards, program.optimizer_implementation)
        return cls(recipe, program, optimizer, build_schedule(recipe.optimizer, optimizer, recipe.steps))

    @seam
    def tensors(self) -> list[LocalShard]:
        """Return all of this rank's shards: `weight/NAME`, `buffer/NAME`, `optimizer/NAME.MOMENT`."""
        program = self.program
        return [
            *(replace(shard, name=f"weight/{shard.name}") for shard in program.shards),
            *(replace(shard, name=f"buffer/{shard.name}") for shard in program.buffers),
            *self._moments(),
        ]

    def _moments(self) -> Iterator[LocalShard]:
        for name, local, region in optimizer_state(self.optimizer, self.program.shards):
            yield LocalShard(f"optimizer/{name}", local, region)

    def facts(self) -> dict[str, Any]:
        """Return the state outside tensors; `by_name` has the options of each local parameter's group."""
        return {
            "recipe": self.recipe.fingerprint(),
            "step": self.step,
            "position": self.position,
            "schedule": self.schedule.last_epoch,
            "by_name": {
                name: {key: value for key, value in group.items() if key not in _IMPLEMENTATION}
                for name, group in self._groups()
            },
        }

    def _groups(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the name of each parameter with its optimizer group."""
        groups = {id(tensor): group for group in self.optimizer.param_groups for tensor in group["params"]}
        for shard in self.program.shards:
            yield shard.name, groups[id(shard.tensor)]

    @seam
    def restore(self, facts: Mapping[str, Any]) -> None:
        """Restore the facts of a checkpoint whose tensors were already loaded into `tensors()`.

        Raises: FormatError when a parameter of this rank has no options, or when the options of a group
        differ.
        """
        self.restore_groups(facts["by_name"])
        rates = [group["initial_lr"] for group in self.optimizer.param_groups]
        now = [group["lr"] for group in self.optimizer.param_groups]
        epoch = facts["schedule"]
        known = self.schedule.state_dict()
        self.schedule.load_state_dict(
            # The constructor of a schedule makes a step, which raises `_step_count` to 1 and `last_epoch` to 0.
            {**known, "base_lrs": rates, "_last_lr": now, "last_epoch": epoch, "_step_count": epoch + 1}
        )
        self.step = facts["step"]
        self.position = facts["position"]

    @seam
    def restore_groups(self, by_name: Mapping[str, Mapping[str, Any]]) -> None:
        """Set each optimizer group to the options that its parameters were saved with.

        Raises: FormatError when a parameter has no options, or when the options of a group differ.
        """
        chosen: dict[int, tuple[str, Mapping[str, Any]]] = {}
        for name, group in self._groups():
            if name not in by_name:
                raise FormatError(f"the checkpoint has no optimizer options of {name}")
            first, options = chosen.setdefault(id(group), (name, by_name[name]))
            if options != by_name[name]:
                raise FormatError(f"{first} and {name} are in one group here and had different options")
        for _, group in self._groups():
            options = chosen[id(group)][1]
            group.update({key: _like(group.get(key), value) for key, value in options.items()})

    def numbers(self) -> dict[str, float]:
        """Return every numeric fact under a unique name."""
        found: dict[str, float] = {
            "step": self.step,
            "data position": self.position,
            "schedule": self.schedule.last_epoch,
        }
        rates = {
            id(group): rate
            for group, rate in zip(self.optimizer.param_groups, self.schedule.base_lrs, strict=True)
        }
        for name, group in self._groups():
            found |= {f"{name}: {key}": value for key, value in _list_numbers(group)}
            found[f"{name}: scheduled lr"] = float(rates[id(group)])
        return found

    @seam
    def materialize(self) -> None:
        """Create the optimizer's state tensors, filled with zero, as targets for loading a checkpoint.

        The state is created by a step with zero gradients, learning rate and weight decay: no weight moves.
        """
        options = [(group["lr"], group["weight_decay"]) for group in self.optimizer.param_groups]
        for shard in self.program.shards:
            # Optimizers skip a parameter whose gradient is None.
            shard.tensor.grad = torch.zeros_like(shard.tensor)
        for group in self.optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.0, 0.0
        # Bypass the schedule's wrapper around `step`, which counts steps.
        type(self.optimizer).step(self.optimizer)
        for group, (rate, decay) in zip(self.optimizer.param_groups, options, strict=True):
            group["lr"], group["weight_decay"] = rate, decay
        self.optimizer.zero_grad(set_to_none=True)
        # Adam's step counter is 1 by now.
        for shard in self._moments():
            _clear(shard.tensor)

    def advance(self) -> None:
        """Advance to the next step. A user's step may advance the schedule itself."""
        custom = self.program.custom_step
        if custom is None or not custom.steps_schedule:
            self.schedule.step()
        self.step += 1
        self.position += 1


def _list_numbers(group: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield every numeric option of a group, and each number of a tuple or list."""
    for key, value in group.items():
        if key in _IMPLEMENTATION:
            continue
        if isinstance(value, int | float):
            yield key, float(value)
        elif isinstance(value, tuple | list):
            yield from ((f"{key} {place}", float(each)) for place, each in enumerate(value))


def _like(old: Any, new: Any) -> Any:
    """Convert a value that was read from JSON to the type of the old value."""
    return tuple(new) if isinstance(old, tuple) else new


@torch.no_grad()
def _clear(local: Tensor) -> None:
    local.zero_()
