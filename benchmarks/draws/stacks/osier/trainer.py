"""One optimizer step: passes, the reduction of gradients, the clip, the optimizer, bias and average."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from osier.adam import ShardedAdam
from osier.data import passes
from osier.moe import Router
from osier.ops import all_reduce

BIAS_RATE = 0.02


def run_passes(model, micro_batches, num_valid: int) -> torch.Tensor:
    """Accumulate gradients of the loss per valid token of the whole batch. Returns this rank's part of the loss."""
    total = torch.zeros(())
    work = list(passes(micro_batches, model.c.rows_per_pass, model.dims))
    for index, (tokens, targets) in enumerate(work):
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(index == len(work) - 1)
        value = sum(model(tokens, targets).values()) / num_valid
        value.backward()
        total = total + value.detach()
    return total


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def clip_gradients(model, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Clip by the norm over all parameters, where `cut_over` has the groups over which one is cut."""
    squares = {}
    for parameter in model.parameters():
        group = getattr(parameter, "cut_over", None)
        square = local(parameter.grad).square().sum()
        squares[group] = squares.get(group, 0) + square
    total = sum(square if group is None else all_reduce(square, group) for group, square in squares.items())
    norm = total.sqrt()
    coefficient = (limit / (norm + 1e-6)).clamp(max=1.0)
    for parameter in model.parameters():
        local(parameter.grad).mul_(coefficient)
    return norm, coefficient


@torch.no_grad()
def update_bias(model) -> None:
    """Move the selection bias towards equal loads."""
    for module in model.modules():
        if isinstance(module, Router):
            seen = all_reduce(module.seen, model.dims.batch)
            module.bias += BIAS_RATE * (seen.mean() - seen).sign()
            module.seen.zero_()


def train_step(model, optimizer, micro_batches, *, num_valid, scheduler, clip_norm, finish):
    total = run_passes(model, micro_batches, num_valid)
    finish()
    told = update(model, optimizer, scheduler, clip_norm)
    return {"loss": all_reduce(total, model.dims.batch), **told}


def update(model, optimizer, scheduler, clip_norm) -> dict[str, torch.Tensor]:
    """Clip complete gradients, and move weights, bias and average."""
    norm, coefficient = clip_gradients(model, clip_norm)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    update_bias(model)
    if model.c.ema:
        model.ema.update(model)
    return {"gradient_norm": norm, "clip_coefficient": coefficient}


def adam_step(model, optimizer, micro_batches, *, num_valid, scheduler, clip_norm, finish):
    """As `train_step`, where the optimizer state is divided and the optimizer reduces gradients itself."""
    if not hasattr(model, "adam"):
        model.adam = ShardedAdam(model, model.dims)
    total = run_passes(model, micro_batches, num_valid)
    norm, coefficient = model.adam.prepare(clip_norm)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    update_bias(model)
    return {"loss": all_reduce(total, model.dims.batch), "gradient_norm": norm, "clip_coefficient": coefficient}
