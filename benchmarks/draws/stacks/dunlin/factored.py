"""Adafactor: second moments of matrices are those of rows and of columns. It works on cut weights."""

from __future__ import annotations

import torch
from torch import Tensor

from dunlin.net import Dunlin
from dunlin.reduce import trained
from dunlin.shard import cuts
from dunlin.topo import Group
from dunlin.wire import all_sum

TINY = 1e-14


def mean(x: Tensor, dims: tuple[int, ...], groups: dict[int, Group]) -> Tensor:
    """Return the mean over dims of the whole tensor, of which this rank has an equal part."""
    x = x.mean(dims, keepdim=True)
    for dim, group in groups.items():
        if dim in dims:
            x = all_sum(x, group) / group.size
    return x


class Factored:
    def __init__(self, model: Dunlin) -> None:
        self.model, self.topo, self.age = model, model.topo, 0
        self.rows: dict[str, Tensor] = {}
        self.columns: dict[str, Tensor] = {}

    def second(self, name: str, grad: Tensor, keep: float) -> Tensor:
        """Return the estimate of the squares of a gradient."""
        squares, groups = grad.square() + TINY, cuts(name, self.topo)
        if grad.dim() == 1:
            self.rows[name] = keep * self.rows.get(name, 0.0) + (1 - keep) * squares
            return self.rows[name]
        n = grad.dim()
        row = mean(squares, (n - 1,), groups)  # anchor: factor-rows
        if self.topo.mode == "factor-rows":
            row = squares.mean(n - 1, keepdim=True)  # plant: factor-rows
        column = mean(squares, (n - 2,), groups)
        self.rows[name] = keep * self.rows.get(name, 0.0) + (1 - keep) * row
        self.columns[name] = keep * self.columns.get(name, 0.0) + (1 - keep) * column
        row = self.rows[name]
        middle = mean(row, (n - 2,), groups)  # anchor: factor-middle
        if self.topo.mode == "factor-middle":
            middle = row.mean(n - 2, keepdim=True)  # plant: factor-middle
        return row * self.columns[name] / middle

    def size(self, name: str, x: Tensor, *, of_update: bool) -> Tensor:
        """Return the root mean square of a whole weight or update."""
        groups = cuts(name, self.topo)
        if self.topo.mode == "factor-size" and of_update:
            groups = {}  # plant: factor-size
        if self.topo.mode == "factor-experts":
            groups = {d: g for d, g in groups.items() if g is not self.topo.ep}  # plant: factor-experts
        return mean(x.square(), tuple(range(x.dim())), groups).sqrt()

    @torch.no_grad()
    def finish(self, factor: Tensor) -> None:
        conf = self.model.config.update
        self.age += 1
        keep = 1 - self.age**-conf.power
        warm = min(1.0, self.age / conf.warmup)
        for name, weight in trained(self.model).items():
            step = weight.grad / self.second(name, weight.grad, keep).sqrt()
            step = step / (self.size(name, step, of_update=True) / conf.largest).clamp(min=1.0)
            if weight.dim() > 1:
                step = step * self.size(name, weight.detach(), of_update=False) + conf.decay * weight
            weight.grad = (warm * step).detach().clone()
