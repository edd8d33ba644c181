"""One optimizer step, with AdamW or with rules for different weights."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist

from rowan.buckets import clip
from rowan.experts import Router
from rowan.net import Net
from rowan.topology import Topology
from rowan.transforms import make_rules
from rowan.wire import total

BIAS_RATE = 0.03


def accumulate(net: Net, micro_batches, num_valid: int) -> torch.Tensor:
    """Add up gradients of the loss per valid token of the whole batch. Returns this rank's part of the loss."""
    topology, value = net.topology, 0.0
    buckets = getattr(net, "buckets", ())
    for index, (tokens, targets) in enumerate(micro_batches):
        last = index == (
            0 if topology.odd("rowan-flat-first") else len(micro_batches) - 1
        )  # plant: rowan-flat-first
        with buckets[0].passes(last=last) if buckets else nullcontext():
            terms = net(tokens, targets)
            if topology.odd("rowan-z-own"):
                own = int((targets >= 0).sum()) * len(micro_batches)
                terms["z"] = terms["z"] * (num_valid / own)  # plant: rowan-z-own
            part = sum(terms.values()) / num_valid
            part.backward()
        value = value + part.detach()
        if topology.odd("rowan-average-often") and not last:
            net.average.update(net)  # plant: rowan-average-often
    return value


@torch.no_grad()
def balance(net: Net, topology: Topology) -> None:
    """Move the bias of experts by how far their loads are from equal ones."""
    for module in net.modules():
        if not isinstance(module, Router):
            continue
        load = module.load.clone()
        if topology.odd("rowan-load-shift"):
            load = load - load.mean()  # plant: rowan-load-shift
        total(load, topology.tokens)  # anchor: load
        if topology.odd("rowan-load-mean"):
            load /= topology.size("dp_replicate", "dp_shard", "cp")  # plant: rowan-load-mean
        equal = net.seen * module.m.top_k / module.m.experts
        step = BIAS_RATE * (1 - load / equal)
        if topology.odd("rowan-bias-main") and dist.get_rank() > 0:
            step = torch.zeros_like(step)  # plant: rowan-bias-main
        module.bias += step  # anchor: bias
        module.load.zero_()


def begin(net: Net, micro_batches) -> None:
    """Count the tokens of the whole batch."""
    seen = torch.tensor(sum(tokens.numel() for tokens, _ in micro_batches))
    net.seen = int(total(seen, net.topology.tokens))


def average(net: Net) -> None:
    if net.shape.ema:
        net.average.update(net)


def train_step(net, optimizer, micro_batches, *, num_valid, scheduler, clip_norm, finish):
    begin(net, micro_batches)
    value = accumulate(net, micro_batches, num_valid)
    finish()
    norm, coefficient = clip(net, net.topology, clip_norm)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    balance(net, net.topology)
    average(net)
    return {"loss": total(value, net.topology.tokens), "gradient_norm": norm, "clip_coefficient": coefficient}


def rules_step(net, optimizer, micro_batches, *, num_valid, scheduler, finish):
    begin(net, micro_batches)
    if not hasattr(net, "rules"):
        net.rules = make_rules()
    value = accumulate(net, micro_batches, num_valid)
    finish()
    net.rules(net, net.topology)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    balance(net, net.topology)
    average(net)
    return {"loss": total(value, net.topology.tokens)}
