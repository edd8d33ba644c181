"""Muon: orthogonal directions for the matrices of blocks, each computed by one of the ranks that have it."""

import torch

from wren.model import cuts_of
from wren.parallel import complete, pools_of
from wren.world import own_part, raw_gather, raw_sum


def is_matrix(name, parameter):
    return name.startswith("blocks") and parameter.dim() > 1 and not name.endswith(("gain", "router.weight"))


def matrices_of(name, value):
    """Return (matrices, rows, columns), where heads of attention are rows of one matrix."""
    if ".attention." in name:
        return value.flatten(0, -2)[None]
    return value.reshape(-1, *value.shape[-2:])


def orthogonal(x, steps):
    """Move the singular values of matrices towards 1, by the iteration of Newton and Schulz."""
    x = x / (x.square().sum((-2, -1), keepdim=True).sqrt() + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = 3.4445 * x - 4.775 * square @ x + 2.0315 * square @ (square @ x)
    return x


class Muon:
    """Directions go to an optimizer that subtracts them times the rate."""

    def __init__(self, model):
        self.model, self.c, self.w = model, model.c, model.world
        self.pools = pools_of(model)
        self.momentum, self.steps = {}, 0

    def attach(self):
        for pool in self.pools:
            pool.attach()

    def reduce(self):
        complete(self.model, self.pools)

    @torch.no_grad()
    def update(self):
        self.steps += 1
        number = 0
        for pool in self.pools:
            for name, parameter in pool.named:
                if is_matrix(name, parameter):
                    parameter.grad.copy_(self.share(name, parameter, number, pool.team))
                    number += 1
                else:
                    parameter.grad.copy_(self.signed(name, parameter.grad))

    def signed(self, name, gradient):
        """Return a direction for other parameters: the gradient over its root mean square so far."""
        average = self.momentum.setdefault(name, torch.zeros_like(gradient))
        average.lerp_(gradient.square(), 0.1)
        return gradient / ((average / (1 - 0.9**self.steps)).sqrt() + self.c.eps)

    def share(self, name, parameter, number, team):
        """Return the direction of a matrix, which its owner computes."""
        w = self.w
        owns = number % team.size == team.rank  # anchor: owns
        if w.has("wren-muon-owner"):
            owns = number % w.dp.size == w.dp.rank  # plant: wren-muon-owner
        direction = torch.zeros_like(parameter)
        if owns:
            direction = self.direction(name, parameter.grad)
        return raw_sum(direction, team)

    def direction(self, name, gradient):
        c, w = self.c, self.w
        momentum = self.momentum.setdefault(name, torch.zeros_like(gradient))
        momentum.mul_(c.momentum).add_(gradient)
        dim = cuts_of(name)["tp"]
        if w.has("wren-muon-block"):
            return self.scaled(name, momentum, gradient)  # plant: wren-muon-block
        whole = raw_gather(momentum.transpose(0, dim), w.tp).transpose(0, dim)  # anchor: whole-matrix
        shape = whole  # anchor: muon-shape
        if w.has("wren-muon-shape"):
            shape = momentum  # plant: wren-muon-shape
        return own_part(self.scaled(name, whole, shape).transpose(0, dim), w.tp).transpose(0, dim)

    def scaled(self, name, momentum, shape):
        """Return orthogonal directions of matrices, larger for tall ones."""
        rows, columns = matrices_of(name, shape).shape[-2:]
        out = orthogonal(matrices_of(name, momentum), self.c.newton_steps)
        return out.view_as(momentum) * max(1, rows / columns) ** 0.5
