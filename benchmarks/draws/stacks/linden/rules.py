"""The rules of the optimizer: schedule, decay, clip, and the average of the weights."""

import math

import torch

from linden.shard import cuts_of, leaf_of
from linden.topo import all_sum

UNDECAYED = (
    "table",
    "head_bias",
    "norm_end",
    "norm_a",
    "norm_f",
    "q_gain",
    "k_gain",
    "sink",
    "o_bias",
    "s_mix",
)


def factor_of(step, sizes):
    """Return the factor of the rate of step 0, 1, ...: up, level, and down like a root."""
    if step < sizes.warmup:
        return (step + 1) / (sizes.warmup + 1)
    late = step - sizes.warmup - sizes.stable
    return 1.0 if late < 0 else 1 - math.sqrt(min(1.0, (late + 1) / sizes.cooldown))


def decays(name, topo):
    if topo.on("linden-decay-names"):
        return name not in UNDECAYED  # plant: linden-decay-names
    return leaf_of(name) not in UNDECAYED  # anchor: decays


def whole_square(named, topo):
    """Return the squared norm of gradients of the whole model, each rank with its blocks."""
    total = 0.0
    for name, gradient in named:
        square = gradient.square().sum()
        axes = [axis for axis, _ in cuts_of(name, topo)]
        if topo.on("linden-norm-tp"):
            axes = [axis for axis in axes if axis is not topo.tp]  # plant: linden-norm-tp
        if topo.on("linden-norm-replicas"):
            axes = [*axes, topo.replicas]  # plant: linden-norm-replicas
        total = total + all_sum(square, *axes)
    return total


@torch.no_grad()
def clip(net):
    """Scale gradients to a norm of at most the limit. Returns the norm and the factor."""
    topo = net.topo
    named = [(n, p.grad) for n, p in net.named_parameters()]
    norm = whole_square(named, topo).sqrt()
    limit = norm  # anchor: limit
    if topo.on("linden-clip-square"):
        limit = norm.square()  # plant: linden-clip-square
    factor = (net.sizes.max_norm / (limit + 1e-6)).clamp(max=1.0)
    for name, gradient in named:
        if topo.on("linden-clip-vectors") and gradient.dim() == 1:
            continue  # plant: linden-clip-vectors
        gradient.mul_(factor)
    return norm, factor


@torch.no_grad()
def average(net, count):
    """Move the average of the weights, faster at the start. `count` is the number of steps before."""
    decay = min(net.sizes.ema_decay, (1 + count) / (4 + count))
    for name, parameter in net.named_parameters():
        shadow = getattr(net, f"ema_{name}")
        shadow.lerp_(parameter.detach(), 1 - decay)
