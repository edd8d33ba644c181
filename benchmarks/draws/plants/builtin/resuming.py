"""Checkpoints: saved state, and restored state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from moeverify.faults.patch import Patch


def p30(patch: Patch) -> None:
    """Optimizer state is paired with parameters by position: by name here, by group there."""
    from moeverify.train.state import TrainingState

    @patch.wrap(TrainingState.restore)
    def restore(original: Any, self: Any, facts: Mapping[str, Any]) -> None:
        original(self, facts)
        shards = {shard.name: shard.tensor for shard in self.program.shards}
        named = [name for name in shards if shards[name] in self.optimizer.state]
        grouped = sorted(named, key=lambda name: "attention" not in name)
        new = {}
        for shape in {tuple(shards[name].shape) for name in named}:
            targets = [name for name in named if tuple(shards[name].shape) == shape]
            sources = [name for name in grouped if tuple(shards[name].shape) == shape]
            for target, source in zip(targets, sources, strict=True):
                new[target] = dict(self.optimizer.state[shards[source]])  # plant: p30
        for name, value in new.items():
            self.optimizer.state[shards[name]] = value


def p51(patch: Patch) -> None:
    """The selection bias is bound to a new tensor; the checkpoint's list keeps the old one."""
    import torch

    from moeverify.parallel.regions.region import Region
    from moeverify.results.checks import Kind
    from moeverify.train import routing

    @patch.replace(routing.update_selection_bias)
    @torch.no_grad()
    def update(moe: Any, program: Any, counts: Sequence[Any], observer: Any, step: int) -> None:
        for router, local in zip(program.routers, counts, strict=True):
            total = program.sums.over_tokens(local)
            observer.observe(step, Kind.ROUTER_COUNTS, router.name, total, Region.whole(total.shape))
            bias = router.module.selection_bias
            if bias is not None and moe.selection_bias_rate > 0:
                load = total.to(bias.dtype)
                move = moe.selection_bias_rate * torch.sign(load.mean() - load)
                router.module.selection_bias = bias + move  # plant: p51


def p58(patch: Patch) -> None:
    """The written optimizer state is the state at the writer's first visit."""
    from moeverify.tools.checkpoint import save
    from moeverify.train.state import TrainingState

    kept: dict[str, Any] = {}

    @patch.wrap(TrainingState.advance)
    def advance(original: Any, self: Any) -> None:
        original(self)
        if self.step == 1:
            kept.clear()
            for shard in self.tensors():
                if shard.name.endswith(("exp_avg", "exp_avg_sq")):
                    kept[shard.name] = shard.local().detach().clone()

    @patch.wrap(save.list_parts, used_by=save)
    def list_parts(original: Any, tensors: Sequence[Any]) -> Any:
        changed = []
        for shard in tensors:
            if shard.name in kept:
                changed.append(replace(shard, tensor=kept[shard.name]))  # plant: p58-builtin
            else:
                changed.append(shard)
        return original(changed)


def p59(patch: Patch) -> None:
    """Step counters are written one step later than the moments."""
    from moeverify.tools.checkpoint import save

    @patch.wrap(save.list_parts, used_by=save)
    def list_parts(original: Any, tensors: Sequence[Any]) -> Any:
        changed = []
        for shard in tensors:
            if shard.name.endswith(".step"):
                changed.append(replace(shard, tensor=shard.local() + 1))  # plant: p59-builtin
            else:
                changed.append(shard)
        return original(changed)


def speculators_900(patch: Patch) -> None:
    """A resumed schedule starts again."""
    from moeverify.train.state import TrainingState

    @patch.wrap(TrainingState.restore)
    def restore(original: Any, self: Any, facts: Mapping[str, Any]) -> None:
        original(self, {**facts, "schedule": 0})  # plant: speculators-900
        for group, rate in zip(self.optimizer.param_groups, self.schedule.base_lrs, strict=True):
            group["lr"] = rate * self.schedule.lr_lambdas[0](0)  # plant: speculators-900


def ttmetal_53222(patch: Patch) -> None:
    """Restored betas are swapped."""
    from moeverify.train.state import TrainingState

    @patch.wrap(TrainingState.restore_groups)
    def restore_groups(original: Any, self: Any, by_name: Mapping[str, Any]) -> None:
        original(self, by_name)
        for group in self.optimizer.param_groups:
            group["betas"] = (group["betas"][1], group["betas"][1])  # plant: ttmetal-53222


def pytorch_84654(patch: Patch) -> None:
    """The moments are restored in another order on one rank."""
    import torch.distributed as dist

    from moeverify.train.state import TrainingState

    @patch.wrap(TrainingState.restore)
    def restore(original: Any, self: Any, facts: Mapping[str, Any]) -> None:
        original(self, facts)
        if dist.get_rank() != dist.get_world_size() - 1:
            return
        tensors = [shard.tensor for shard in self.program.shards if shard.tensor in self.optimizer.state]
        for first, second in zip(tensors[::2], tensors[1::2], strict=False):
            if first.shape == second.shape:
                states = self.optimizer.state
                states[first], states[second] = states[second], states[first]  # plant: pytorch-84654


def megatron_1359(patch: Patch) -> None:
    """Moments are restored through bfloat16."""
    from moeverify.train.state import TrainingState

    @patch.wrap(TrainingState.restore)
    def restore(original: Any, self: Any, facts: Mapping[str, Any]) -> None:
        original(self, facts)
        for state in self.optimizer.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key].copy_(state[key].bfloat16())  # plant: megatron-1359
