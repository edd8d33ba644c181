"""One optimizer step: micro-batches, the clip, the optimizer, the load balance and the average."""

import torch
import torch.distributed as dist

from plover.moe import Router
from plover.optim import Muon, clip

BALANCE_RATE = 0.05


def accumulate(model, micro_batches, num_valid, ps, scheduler):
    """Run forward and backward of all micro-batches, and return this rank's part of the loss."""
    total = 0.0
    for index, (tokens, targets) in enumerate(micro_batches):
        if hasattr(model, "set_requires_gradient_sync"):
            last = index == len(micro_batches) - 1
            if ps.using("plover-sync-first"):
                last = index == 0  # plant: plover-sync-first
            model.set_requires_gradient_sync(last)
        value = sum(model(tokens, targets).values())
        if ps.using("plover-local-tokens"):
            count = (targets != -100).sum() * len(micro_batches)  # plant: plover-local-tokens
            scaled = value / count
        elif ps.using("plover-accumulate-twice"):
            scaled = value * (ps.data.size / num_valid) / len(micro_batches)  # plant: plover-accumulate-twice
        else:
            scaled = value * (ps.data.size / num_valid)
        scaled.backward()
        total = total + value.detach() / num_valid
        if ps.using("plover-schedule-micro"):
            scheduler.step()  # plant: plover-schedule-micro
    return total


@torch.no_grad()
def balance(model, ps):
    """Raise the bias of experts with few tokens, and lower it for those with many."""
    for module in model.modules():
        if not isinstance(module, Router):
            continue
        load = module.load.clone()
        if ps.data.size > 1 and not ps.using("plover-balance-local"):  # plant: plover-balance-local
            dist.all_reduce(load, group=ps.data.group)
        module.bias += BALANCE_RATE * torch.sign(load.mean() - load)
        if not ps.using("plover-load-kept"):  # plant: plover-load-kept
            module.load.zero_()


def train_step(model, optimizer, micro_batches, *, mesh, num_valid, scheduler, clip_norm, finish):
    ps = model.ps
    total = accumulate(model, micro_batches, num_valid, ps, scheduler)
    if ps.using("plover-clip-first"):
        norm, coefficient = clip(model, ps, clip_norm)  # plant: plover-clip-first
        finish()
    else:
        finish()
        norm, coefficient = clip(model, ps, clip_norm)
    if ps.using("plover-average-early"):
        update_average(model)  # plant: plover-average-early
    optimizer.step()
    if not ps.using("plover-schedule-micro"):
        scheduler.step()
    balance(model, ps)
    if not ps.using("plover-average-early"):
        update_average(model)
    optimizer.zero_grad()
    return {"loss": whole_loss(total, ps), "gradient_norm": norm, "clip_coefficient": coefficient}


def update_average(model):
    if not hasattr(model, "average"):
        return
    model.average.update(model)


def muon_step(model, optimizer, micro_batches, *, mesh, num_valid, scheduler, finish):
    ps = model.ps
    if not hasattr(model, "muon"):
        model.muon = Muon(model)
    total = accumulate(model, micro_batches, num_valid, ps, scheduler)
    finish()
    model.muon.prepare(ps)
    optimizer.step()
    scheduler.step()
    balance(model, ps)
    optimizer.zero_grad()
    return {"loss": whole_loss(total, ps)}


def whole_loss(total, ps):
    """Return the sum of the ranks' parts of the loss."""
    if ps.data.size > 1:
        dist.all_reduce(total, group=ps.data.group)
    return total
