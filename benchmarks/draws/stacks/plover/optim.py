"""Muon on the ranks of a group, an average of the weights, and norms of gradients."""

import re

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


class Average(nn.Module):
    """An exponential moving average of all parameters, in buffers."""

    def __init__(self, model, decay=0.8):
        super().__init__()
        self.decay = decay
        self.names = {}
        for name, parameter in model.named_parameters():
            self.names[name] = name.replace(".", "_")
            self.register_buffer(self.names[name], parameter.detach().clone())

    @torch.no_grad()
    def update(self, model):
        for name, parameter in model.named_parameters():
            getattr(self, self.names[name]).lerp_(parameter.detach(), 1 - self.decay)


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_axis(parameter, ps):
    """Return the axis that a parameter is cut over, or None."""
    if isinstance(parameter, DTensor):
        return ps.shard
    return getattr(parameter, "axis", None)


def global_norm(model, ps):
    """Return the norm of all gradients of the whole model, the same on all ranks."""
    squares = {}
    for parameter in model.parameters():
        axis = shard_axis(parameter, ps)
        if ps.using("plover-norm-replicated"):
            axis = ps.tp  # plant: plover-norm-replicated
        square = local(parameter.grad).square().sum()
        squares[axis] = squares.get(axis, 0) + square
    total = 0
    for axis, square in squares.items():
        if axis is not None and not ps.using("plover-norm-local"):  # plant: plover-norm-local
            dist.all_reduce(square, group=axis.group)
        total = total + square
    return total.sqrt()


def clip(model, ps, limit):
    norm = global_norm(model, ps)
    coefficient = (limit / (norm + 1e-6)).clamp(max=1.0)
    for parameter in model.parameters():
        local(parameter.grad).mul_(coefficient)
    return norm, coefficient


def orthogonalize(matrix, steps=3):
    """Newton-Schulz steps towards the nearest orthogonal matrix, of the last two dims."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / (matrix.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return x


def depth_of(name):
    """Return the number of the block that a parameter is in; 0 outside of blocks."""
    found = re.match(r"blocks\.(\d+)\.", name)
    return int(found.group(1)) + 1 if found else 0


def rate_of(name, ps):
    """Return the factor of the learning rate by depth."""
    if ps.using("plover-depth-name"):
        found = re.search(r"\.(\d)", name)  # plant: plover-depth-name
        return 0.8 ** int(found.group(1)) if found else 1.0
    return 0.8 ** depth_of(name)


class Muon:
    """Puts orthogonal updates in the place of gradients. Matrices are divided among the ranks in turn."""

    def __init__(self, model, momentum=0.9, steps=5):
        self.model, self.momentum, self.steps = model, momentum, steps
        self.buffers = {}

    def matrices(self):
        return [(n, p) for n, p in self.model.named_parameters() if p.dim() > 1 and not n.startswith("embed")]

    def direction(self, name, gradient, ps):
        buffer = self.buffers.setdefault(name, torch.zeros_like(gradient))
        buffer.mul_(self.momentum).add_(gradient)
        if ps.using("plover-momentum-alias"):
            ahead = buffer.mul_(self.momentum).add_(gradient)  # plant: plover-momentum-alias
        else:
            ahead = gradient + self.momentum * buffer
        if ps.using("plover-default-steps"):
            return orthogonalize(ahead)  # plant: plover-default-steps
        return orthogonalize(ahead, self.steps)

    @torch.no_grad()
    def prepare(self, ps):
        """Replace the gradients of matrices by their updates, each computed by one rank."""
        pairs = self.matrices()
        for index, (name, parameter) in enumerate(pairs):
            if index % ps.data.size == ps.data.rank:
                parameter.grad.copy_(self.direction(name, parameter.grad.clone(), ps))
        if ps.data.size > 1:
            self.exchange(pairs, ps)
        for name, parameter in self.model.named_parameters():
            parameter.grad.mul_(rate_of(name, ps))

    def exchange(self, pairs, ps):
        """Give all ranks the updates that one of them computed."""
        if ps.using("plover-owner-order"):
            pairs = sorted(pairs, key=lambda pair: pair[1].numel())  # plant: plover-owner-order
        for index, (_, parameter) in enumerate(pairs):
            owner = ps.data.global_rank(index)
            dist.broadcast(parameter.grad, owner, group=ps.data.group)
