"""One optimizer step: with torch's AdamW, with shards, or with Muon."""

import torch
import torch.distributed as dist

from wren.clip import clip
from wren.experts import move_biases
from wren.muon import Muon
from wren.parallel import complete, pools_of
from wren.passes import Passes
from wren.zero import Zero


def train_step(model, optimizer, micro_batches, *, scheduler):
    if model.run is None:
        model.run = pools_of(model)
    for pool in model.run:
        pool.attach()
    value = Passes(model, micro_batches).run()
    if model.world.has("wren-clip-early"):
        norm, factor = clip(model)
        complete(model, model.run)  # plant: wren-clip-early
    else:
        complete(model, model.run)  # anchor: complete
        norm, factor = clip(model)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    move_biases(model)
    return {"loss": value, "gradient_norm": norm, "clip_coefficient": factor}


def zero_step(model, optimizer, micro_batches):
    if model.run is None:
        model.run = Zero(model)
    model.run.attach()
    value = Passes(model, micro_batches).run()
    tokens = torch.tensor(sum(tokens.numel() for tokens, _ in micro_batches))
    norm, factor = model.run.update(optimizer.param_groups[0]["lr"], tokens)
    optimizer.step()
    optimizer.zero_grad()
    move_biases(model)
    if model.run.steps == model.c.restart_after:
        restart(model, save(model))
    return {"loss": value, "gradient_norm": norm, "clip_coefficient": factor}


def muon_step(model, optimizer, micro_batches):
    if model.run is None:
        model.run = Muon(model)
    model.run.attach()
    value = Passes(model, micro_batches).run()
    model.run.reduce()
    norm, factor = clip(model)
    model.run.update()
    optimizer.step()
    optimizer.zero_grad()
    move_biases(model)
    return {"loss": value, "gradient_norm": norm, "clip_coefficient": factor}


def save(model):
    """Return the files of the ranks of `tok`, each with the slices of its rank."""
    team = model.world.tok
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    files = [{"model": weights, "zero": model.run.state()}]
    if team.size > 1:
        (file,), files = files, [None] * team.size
        dist.all_gather_object(files, file, group=team.handle)
    return files


@torch.no_grad()
def restart(model, files):
    """Go on as a new process does, which begins with other values."""
    for x in (*model.parameters(), *model.buffers()):
        x.zero_()
    file = files[model.world.tok.rank]  # anchor: own-file
    if model.world.has("wren-load-first"):
        file = files[0]  # plant: wren-load-first
    model.load_state_dict(file["model"])
    model.run = Zero(model)
    model.run.load(files)
