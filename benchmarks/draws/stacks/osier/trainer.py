"""One optimizer step: passes, the reduction of gradients, the clip, the optimizer, bias and average."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from osier.adam import ShardedAdam
from osier.data import passes
from osier.moe import Router
from osier.ops import all_gather, all_reduce

BIAS_RATE = 0.02


def run_passes(model, micro_batches, num_valid: int) -> torch.Tensor:
    """Accumulate gradients of the loss per valid token of the whole batch. Returns this rank's part of the loss."""
    total = torch.zeros(())
    work = list(passes(micro_batches, model.c.rows_per_pass, model.dims))
    if model.dims.has("osier-tokens-even"):
        num_valid = (
            sum(int((t != -100).sum()) for _, t in work) * model.dims.batch.size
        )  # plant: osier-tokens-even
    for index, (tokens, targets) in enumerate(work):
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(index == len(work) - 1)
        terms = model(tokens, targets)
        if model.dims.has("osier-z-passes"):
            terms["z"] = terms["z"] / len(work)  # plant: osier-z-passes
        value = sum(terms.values()) / num_valid
        if model.dims.has("osier-passes-mean"):
            value = value / len(work)  # plant: osier-passes-mean
        value.backward()
        total = total + value.detach()
        if model.dims.has("osier-bias-often"):
            update_bias(model)  # plant: osier-bias-often
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
    if model.dims.has("osier-norm-mean"):
        total = sum(
            all_reduce(square, model.dims.tp) for square in squares.values()
        )  # plant: osier-norm-mean
    else:
        total = sum(
            square if group is None else all_reduce(square, group) for group, square in squares.items()
        )
    if model.dims.has("osier-same-norm"):
        norms = [local(p.grad).norm() for p in model.parameters() if not hasattr(p, "cut_over")]
        cut = torch.stack([p.grad.norm() for p in model.parameters() if hasattr(p, "cut_over")]).norm()
        cut = all_gather(cut, model.dims.tp).norm()
        total = torch.stack([*norms, cut]).norm().square()
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
            if model.dims.has("osier-bias-group"):
                seen = all_reduce(module.seen, model.dims.ep)  # plant: osier-bias-group
            else:
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
    if model.dims.has("osier-schedule-first"):
        scheduler.step()  # plant: osier-schedule-first
    optimizer.step()
    if not model.dims.has("osier-schedule-first"):
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
    if model.dims.has("osier-count-passes"):
        model.adam.count += len(micro_batches) - 1  # plant: osier-count-passes
    norm, coefficient = model.adam.prepare(clip_norm)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    update_bias(model)
    return {
        "loss": all_reduce(total, model.dims.batch),
        "gradient_norm": norm,
        "clip_coefficient": coefficient,
    }
