"""One optimizer step, with torch's AdamW or that of optim.py."""

import contextlib
import shutil

from torch.nn.parallel import DistributedDataParallel

from hazel import checkpoint
from hazel.comm import all_reduce
from hazel.context import DATA
from hazel.moe import MoE
from hazel.optim import AdamW, clip


def unwrap(model):
    return model.module if isinstance(model, DistributedDataParallel) else model


def count_tokens(micro_batches, pc):
    """Return the number of targets that count, of all ranks and micro-batches."""
    count = sum((targets >= 0).sum() for _, targets in micro_batches)
    if pc.on("hazel-tokens-first"):
        count = (micro_batches[0][1] >= 0).sum() * len(micro_batches)  # plant: hazel-tokens-first
    axes = (*DATA, "tp") if pc.on("hazel-tokens-tp") else DATA  # plant: hazel-tokens-tp
    return all_reduce(count.clone(), pc.group(*axes))  # anchor: tokens


def synced(model, last):
    """Reduce gradients in the last backward pass of a step alone."""
    net = unwrap(model)
    if net.ctx.on("hazel-same-each"):
        return contextlib.nullcontext()
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    elif isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return contextlib.nullcontext()


def accumulate(model, micro_batches):
    """Add up gradients of the loss per token. Returns this rank's part of the loss."""
    net = unwrap(model)
    pc, total = net.ctx, 0.0
    tokens_of_all = count_tokens(micro_batches, pc)
    factor = pc.data_size / tokens_of_all  # gradients are averaged over data ranks
    if pc.on("hazel-factor-rows"):
        factor = pc.size("dp_replicate", "dp_shard") / tokens_of_all  # plant: hazel-factor-rows
    called = net if pc.on("hazel-ddp-inner") else model  # plant: hazel-ddp-inner
    for index, (tokens, targets) in enumerate(micro_batches):
        with synced(model, index == len(micro_batches) - 1):
            terms = called(tokens, targets)  # anchor: called
            value = sum(terms.values())
            if pc.on("hazel-aux-factor"):
                aux = terms["balance"] + terms["sequence"]
                scaled = factor * (value - aux) + aux / tokens_of_all  # plant: hazel-aux-factor
            else:
                scaled = factor * value  # anchor: scaled
            scaled.backward()
        if getattr(net, "main_grads", None) is not None:
            net.main_grads.collect()
        total = total + value.detach() / tokens_of_all
        if pc.on("hazel-shares-early"):
            end_step(net)  # plant: hazel-shares-early
    return total


def end_step(net):
    for block in net.blocks:
        if isinstance(block.mlp, MoE):
            block.mlp.end_step()


def report(total, net):
    """Return the loss of the global batch."""
    return all_reduce(total, net.ctx.group(*DATA))


def train_step(model, optimizer, micro_batches, *, scheduler, clip_norm, finish):
    """A step of torch's optimizer."""
    net = unwrap(model)
    total = accumulate(model, micro_batches)
    finish()
    norm, coefficient = clip(net, clip_norm)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if not net.ctx.on("hazel-shares-early"):
        end_step(net)
    return {"loss": report(total, net), "gradient_norm": norm, "clip_coefficient": coefficient}


class State:
    """What a run has beside the weights."""

    def __init__(self, model):
        net = unwrap(model)
        self.step, self.adam = 0, AdamW(model, net.cfg, net.ctx)


def stop(net):
    """Save the run."""
    folder = checkpoint.shared_folder()
    checkpoint.save(net, net.state, folder)
    return folder


def resume(model, net, folder):
    """Go on from a checkpoint with a new state."""
    net.state = State(model)
    if net.average is not None:
        net.average.start(net)
    for block in net.blocks:
        if isinstance(block.mlp, MoE):
            block.mlp.prior.fill_(1 / net.cfg.experts)
    checkpoint.load(net, net.state, folder)
    shutil.rmtree(folder, ignore_errors=True)


def adam_step(model, optimizer, micro_batches, *, finish):
    """A step of AdamW by hand, whose updates the optimizer subtracts."""
    net = unwrap(model)
    if not hasattr(net, "state"):
        net.state = State(model)
    cfg, pc, state = net.cfg, net.ctx, net.state
    total = accumulate(model, micro_batches)
    finish()
    state.adam.prepare(state.step)
    optimizer.step()
    optimizer.zero_grad()
    state.step += 1
    due = cfg.resume_after == state.step
    if due and pc.on("hazel-resume-early"):
        folder = stop(net)  # plant: hazel-resume-early
    end_step(net)
    if net.average is not None:
        net.average.update(net, cfg.ema_decay, pc)
    if due and not pc.on("hazel-resume-early"):
        folder = stop(net)  # anchor: stop
    if due:
        resume(model, net, folder)
    return {"loss": report(total, net)}
