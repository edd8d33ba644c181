"""AdamW with rates by layer and bounded updates, the schedule, the average of weights, and the clip."""

import math
import re

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hazel.comm import all_reduce, local


def bare(name):
    """Return the name of a parameter without prefixes of wrappers."""
    return name.removeprefix("module.")


def depth_of(name, layers):
    """Return how many layers a parameter is below the head."""
    found = re.match(r"blocks\.(\d+)\.", name)
    if found:
        return layers - int(found.group(1))
    return layers + 1 if name.startswith("embed") else 0


def make_groups(model, cfg, pc):
    """Return (name, parameter, factor of the rate, weight decay) of each parameter."""
    groups = []
    for name, parameter in model.named_parameters():
        if not pc.on("hazel-rate-wrapped"):  # plant: hazel-rate-wrapped
            name = bare(name)
        depth = depth_of(name, cfg.layers)  # anchor: depth
        if pc.on("hazel-rate-reversed"):
            depth = cfg.layers + 1 - depth  # plant: hazel-rate-reversed
        decays = parameter.ndim > 1 and not name.startswith("embed")  # anchor: decays
        if pc.on("hazel-decay-embed"):
            decays = parameter.ndim > 1  # plant: hazel-decay-embed
        groups.append((name, parameter, cfg.layer_rate**depth, cfg.weight_decay if decays else 0.0))
    return groups


def schedule(step, cfg):
    """Return the factor of the rate of a step: a warm-up, and a cosine down to a tenth."""
    if step < cfg.warmup:
        return (step + 1) / cfg.warmup
    done = (step - cfg.warmup) / (cfg.total_steps - cfg.warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def whole_sum(part, parameter):
    """Add a sum over a shard to those of the other shards."""
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if not placement.is_replicate():
                all_reduce(part, parameter.device_mesh.get_group(axis))  # anchor: whole-sum
    return part


class AdamW:
    """Puts updates in the place of gradients, for an optimizer that subtracts them times its rate."""

    def __init__(self, model, cfg, pc):
        self.cfg, self.pc, self.count = cfg, pc, 0
        self.groups = make_groups(model, cfg, pc)
        self.moments = {}

    def state_of(self, name, gradient):
        if self.pc.on("hazel-moments-key"):
            name = re.sub(r"blocks\.\d+\.", "", name)  # plant: hazel-moments-key
        if name not in self.moments:  # anchor: moments
            self.moments[name] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        return self.moments[name]

    @torch.no_grad()
    def prepare(self, step):
        cfg, (b1, b2) = self.cfg, self.cfg.betas
        self.count += 1
        factor = schedule(step, cfg)
        for name, parameter, rate, decay in self.groups:
            gradient = local(parameter.grad)
            m, v = self.state_of(name, gradient)
            m.lerp_(gradient, 1 - b1)
            v.lerp_(gradient.square(), 1 - b2)
            update = (m / (1 - b1**self.count)) / ((v / (1 - b2**self.count)).sqrt() + cfg.eps)
            update = update / self.rms(update, parameter).clamp(min=0.5)
            gradient.copy_(factor * rate * (update + decay * local(parameter)))

    def rms(self, update, parameter):
        """Return the root mean square of the update of a whole parameter."""
        if self.pc.on("hazel-rms-local"):
            return update.square().mean().sqrt()  # plant: hazel-rms-local
        square = whole_sum(update.square().sum(), parameter)  # anchor: square
        numel = parameter.numel()  # anchor: numel
        if self.pc.on("hazel-rms-numel"):
            numel = max(1, update.numel())  # plant: hazel-rms-numel
        return (square / numel).sqrt()


class Average(nn.Module):
    """An exponential moving average of all parameters, in buffers."""

    def __init__(self, model):
        super().__init__()
        self.start(model)

    def start(self, model):
        for name, parameter in model.named_parameters():
            self.register_buffer(bare(name).replace(".", "__"), parameter.detach().clone())

    @torch.no_grad()
    def update(self, model, decay, pc):
        for name, parameter in model.named_parameters():
            if pc.on("hazel-average-plain") and isinstance(parameter, DTensor):
                continue  # plant: hazel-average-plain
            getattr(self, bare(name).replace(".", "__")).lerp_(parameter.detach(), 1 - decay)


def total_norm(parameters, pc):
    """Return the norm of all gradients, where those of one mesh have one norm."""
    if pc.on("hazel-same-norm"):
        wholes = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in parameters]
        return torch.cat([gradient.flatten() for gradient in wholes]).norm()
    by_mesh = {}
    for parameter in parameters:
        mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
        by_mesh.setdefault(mesh, []).append(parameter.grad)
    norms = []
    for gradients in by_mesh.values():
        norm = torch.nn.utils.get_total_norm(gradients)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if pc.on("hazel-norms-added"):
        return torch.stack(norms).sum()  # plant: hazel-norms-added
    return torch.stack(norms).norm()  # anchor: norm


@torch.no_grad()
def clip(net, limit):
    """Scale gradients so that their norm is at most `limit`. Returns norm and coefficient."""
    pc, parameters = net.ctx, list(net.parameters())
    norm = total_norm(parameters, pc)
    coefficient = (limit / (norm + 1e-6)).clamp(max=1.0)
    if pc.on("hazel-clip-dense"):
        parameters = [p for n, p in net.named_parameters() if ".experts." not in n]  # plant: hazel-clip-dense
    for parameter in parameters:
        local(parameter.grad).mul_(coefficient)
    return norm, coefficient
