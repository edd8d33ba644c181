"""One step of training: passes, reduction, clip, update, and what follows it."""

import io

import torch
from torch.distributed.tensor import DTensor

from juniper.experts import move_biases
from juniper.factored import Factored
from juniper.grid import Comm, add_up
from juniper.parallel import list_places


def count_targets(micro_batches, grid):
    """Return the number of targets of the global batch that count."""
    count = sum((targets >= 0).sum() for _, targets in micro_batches)  # anchor: count
    if grid.mode == "ju49":
        count = (micro_batches[0][1] >= 0).sum() * len(micro_batches)  # plant: ju49
    return add_up(count.clone(), grid.tokens)


def run_passes(model, micro_batches):
    """Accumulate gradients of the loss of a token. Returns the loss of the global batch."""
    grid, value = model.grid, 0.0
    count = count_targets(micro_batches, grid)
    # Of FSDP2 gradients are means over ranks.
    scale = getattr(model, "loss_scale", 1)
    for i, (tokens, targets) in enumerate(micro_batches):
        announce(model, last=i == len(micro_batches) - 1)
        terms = sum(model(tokens, targets).values())
        if grid.mode == "ju50":
            own = (targets >= 0).sum()
            terms = terms / own / len(micro_batches) / grid.tokens.size  # plant: ju50
        else:
            terms = terms / count  # anchor: per-token
        (terms * scale).backward()
        value = value + terms.detach()
    return add_up(value, grid.tokens)


def announce(model, *, last):
    if model.reducer is not None:
        model.reducer.begin(last)
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)


@torch.no_grad()
def clip(model):
    """Scale gradients to a norm of the whole model of at most the limit. Returns norm and factor."""
    grid, mode = model.grid, model.grid.mode
    squares = {}
    for place in list_places(model):
        gradient, comm = place.tensor.grad, Comm()
        if isinstance(gradient, DTensor):
            gradient = gradient.to_local()
            if mode != "ju67":  # plant: ju67
                comm = grid.shard  # anchor: shard-norm
        elif place.cut[0]:
            comm = getattr(grid, place.cut[0])  # anchor: cut-norm
        if mode == "ju52" and place.is_expert:
            comm = Comm()  # plant: ju52
        squares[comm] = squares.get(comm, 0.0) + gradient.square().sum()
    norm = sum(add_up(square, comm) for comm, square in squares.items()).sqrt()
    factor = (model.c.max_norm / (norm + 1e-6)).clamp(max=1.0)
    if mode == "ju53":
        factor = model.c.max_norm / (norm + 1e-6)  # plant: ju53
    for parameter in model.parameters():
        parameter.grad.mul_(factor)
    return norm, factor


def count_positions(micro_batches, grid):
    """Return the number of positions of the global batch, padding included."""
    return sum(tokens.numel() for tokens, _ in micro_batches) * grid.tokens.size


@torch.no_grad()
def move_average(model):
    for name, parameter in model.named_parameters():
        shadow = getattr(model.shadow, name.replace(".", "_"))
        shadow.lerp_(parameter.detach(), 1 - model.c.average_decay)


def train_step(model, optimizer, micro_batches, *, scheduler, finish):
    value = run_passes(model, micro_batches)
    finish()
    norm, factor = clip(model)
    optimizer.step()
    scheduler.step()
    if model.grid.mode == "ju54":
        for place in list_places(model):
            if not place.is_expert:
                place.tensor.grad = None  # plant: ju54
    else:
        optimizer.zero_grad()  # anchor: zero-grad
    move_biases(model, count_positions(micro_batches, model.grid))
    return {"loss": value, "gradient_norm": norm, "clip_coefficient": factor}


def factored_step(model, optimizer, micro_batches, *, finish):
    if model.run is None:
        model.run = Factored(model)
    value = run_passes(model, micro_batches)
    finish()
    norm, factor = clip(model)
    model.run.update()
    if model.c.average and model.grid.mode == "ju55":
        move_average(model)  # plant: ju55
    optimizer.step()
    optimizer.zero_grad()
    move_biases(model, count_positions(micro_batches, model.grid))
    if model.c.average and model.grid.mode != "ju55":
        move_average(model)  # anchor: average
    if model.run.step == model.c.restart_after:
        restart(model, save(model))
    return {"loss": value, "gradient_norm": norm, "clip_coefficient": factor}


def save(model):
    """Return the file of this rank."""
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": model.run.saved()}, file)
    file.seek(0)
    return file


@torch.no_grad()
def restart(model, file):
    """Go on as a new process, whose values are others before they are loaded."""
    for x in (*model.parameters(), *model.buffers()):
        x.zero_()
    saved = torch.load(file)
    current = model.state_dict()
    for name, x in saved["model"].items():
        current[name].copy_(x)
    model.run = Factored(model)
    model.run.load(saved["optimizer"])
