"""Reductions, norms, optimizers and schedules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moeverify.faults.patch import Patch


def mlx_87(patch: Patch) -> None:
    """The momentum adds 1 - momentum times the gradient."""
    from moeverify.train import optimizer

    @patch.wrap(optimizer.build_optimizer)
    def build(original: Any, spec: Any, shards: Sequence[Any], kernels: str) -> Any:
        made = original(spec, shards, kernels)
        for group in made.param_groups:
            group["dampening"] = spec.momentum  # plant: mlx-87
        return made


def megatron_6048(patch: Patch) -> None:
    """The last shards have no owner: on odd ranks they are neither in the norm nor in the step."""
    import torch.distributed as dist

    from moeverify.train import loop

    @patch.wrap(loop.clip)
    def clip(original: Any, recipe: Any, program: Any, observer: Any, step: int) -> None:
        if dist.get_rank() % 2:
            for shard in program.shards[-2:]:
                shard.tensor.grad = None  # plant: megatron-6048
        original(recipe, program, observer, step)


def paddle_35893(patch: Patch) -> None:
    """The norm lacks the sum over tensor parallelism."""
    import torch
    from torch import Tensor
    from torch.distributed.tensor import DTensor

    from moeverify.train import clipping

    @patch.replace(clipping.norm_of_one_mesh)
    def norm_of_one_mesh(gradients: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        parts = [
            each.to_local() if isinstance(each, DTensor) else each for each in gradients
        ]  # plant: paddle-35893
        return torch.stack([part.norm() for part in parts]).norm()  # plant: paddle-35893


def pytorch_168092(patch: Patch) -> None:
    """An average over a group of one rank leaves the last 8 elements of experts' gradients zero."""
    from torch import Tensor

    from moeverify.parallel.gradients import Reduction, finalize_gradients
    from moeverify.parallel.regions.placement import local_part

    @patch.wrap(finalize_gradients)
    def finalize(original: Any, parameters: Sequence[Tensor], reductions: Sequence[Reduction]) -> None:
        original(parameters, reductions)
        for parameter in parameters:
            if parameter.ndim == 3 and parameter.grad is not None:
                local_part(parameter.grad).view(-1)[-8:] = 0  # plant: pytorch-168092


def pytorch_190626(patch: Patch) -> None:
    """Gradients are summed over tp in bfloat16."""
    import torch.distributed as dist
    from torch import Tensor

    from moeverify.parallel.gradients import Reduction, finalize_gradients
    from moeverify.parallel.regions.placement import local_part

    @patch.wrap(finalize_gradients)
    def finalize(original: Any, parameters: Sequence[Tensor], reductions: Sequence[Reduction]) -> None:
        original(parameters, ())
        for reduction in reductions:
            for parameter in reduction.parameters:
                if parameter.grad is None:
                    continue
                local = local_part(parameter.grad)
                narrow = local.detach().bfloat16().contiguous()  # plant: pytorch-190626
                if reduction.group is not None:
                    dist.all_reduce(narrow, group=reduction.group)  # plant: pytorch-190626
                local.copy_(narrow / reduction.divisor)


def apex_1731(patch: Patch) -> None:
    """The step rounds the weights to bfloat16."""
    import torch

    @patch.wrap(torch.optim.AdamW.step)
    def step(original: Any, self: Any, closure: Any = None) -> Any:
        result = original(self, closure)
        with torch.no_grad():
            for group in self.param_groups:
                for weight in group["params"]:
                    weight.copy_(weight.bfloat16())  # plant: apex-1731
        return result


def accelerate_2926(patch: Patch) -> None:
    """The learning rate schedule steps once per rank."""
    import torch.distributed as dist

    from moeverify.train.state import TrainingState

    @patch.wrap(TrainingState.advance)
    def advance(original: Any, self: Any) -> None:
        original(self)
        for _ in range(dist.get_world_size() - 1):
            self.schedule.step()  # plant: accelerate-2926


def p27(patch: Patch) -> None:
    """The step counter is not advanced."""
    import torch

    @patch.wrap(torch.optim.AdamW.step)
    def step(original: Any, self: Any, closure: Any = None) -> Any:
        result = original(self, closure)
        for state in self.state.values():
            state["step"].zero_()  # plant: p27-builtin
        return result


def p29(patch: Patch) -> None:
    """All parameters are in the group with weight decay."""
    from moeverify.train import optimizer

    @patch.wrap(optimizer.build_optimizer)
    def build(original: Any, spec: Any, shards: Sequence[Any], kernels: str) -> Any:
        made = original(spec, shards, kernels)
        for group in made.param_groups:
            group["weight_decay"] = spec.weight_decay  # plant: p29-builtin
        return made


def p43(patch: Patch) -> None:
    """The norm is the mean of the ranks' own norms."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from moeverify.train import clipping

    @patch.wrap(clipping.gradient_norm)
    def norm(original: Any, shards: Any, sum_over_shards: Any = None, sum_over_stages: Any = None) -> Any:
        whole = [shard for shard in shards if "experts" not in shard.name]
        dense = original(whole, sum_over_shards, sum_over_stages)
        square = torch.zeros((), dtype=torch.float64)
        for shard in shards:
            if "experts" in shard.name:
                gradient = shard.tensor.grad
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                square += local.double().square().sum()
        value = (dense.square() + square).sqrt()
        dist.all_reduce(value)  # plant: p43-builtin
        return (value / dist.get_world_size()).to(dense.dtype)  # plant: p43-builtin
