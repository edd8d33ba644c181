"""Clipping by the global norm, Muon, a factored second moment and averaged weights, on DTensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from teasel.comm import local_part, psum
from teasel.config import EMAConfig, FactoredConfig, MuonConfig
from teasel.dims import Axis, ParallelDims


def shard_axes(x: Tensor, dim: int | None = None) -> list[Axis]:
    """Return the axes over which a tensor is sharded, along one of its dims or along any."""
    if not isinstance(x, DTensor):
        return []
    mesh = x.device_mesh
    return [
        Axis(mesh.size(i), mesh.get_local_rank(i), mesh.get_group(i))
        for i, placement in enumerate(x.placements)
        if not placement.is_replicate() and dim in (None, getattr(placement, "dim", None))
    ]


def sum_over(value: Tensor, axes: list[Axis]) -> Tensor:
    for axis in axes:
        value = psum(value, axis)
    return value


def is_copy(model: nn.Module, weight: Tensor) -> bool:
    """Return whether another stage of the pipeline has a weight, too, and counts it."""
    dims = model.dims
    return dims["pp"].rank > 0 and weight is model.tok_embeddings.weight


@torch.no_grad()
def gradient_norm(model: nn.Module, dims: ParallelDims) -> Tensor:
    squares: dict[tuple, tuple[list[Axis], Tensor]] = {}
    for weight in model.parameters():
        axes = shard_axes(weight)  # anchor: norm-axes
        if dims.on("teasel-norm-twice") and isinstance(weight, DTensor):
            mesh = weight.device_mesh
            axes = [
                Axis(mesh.size(i), 0, mesh.get_group(i)) for i in range(mesh.ndim)
            ]  # plant: teasel-norm-twice
        if is_copy(model, weight) and not dims.on("teasel-pipe-norm-tied"):
            continue  # plant: teasel-pipe-norm-tied
        if dims.on("teasel-norm-own-experts") and weight.ndim == 3:
            axes = []  # plant: teasel-norm-own-experts
        key = tuple(axis.group for axis in axes)
        _, before = squares.get(key, (axes, 0.0))
        squares[key] = axes, before + local_part(weight.grad).square().sum()
    total = sum(sum_over(square, axes) for axes, square in squares.values())
    if dims.on("teasel-norm-of-shards"):
        total = sum(square for _, square in squares.values())  # plant: teasel-norm-of-shards
    if not dims.on("teasel-pipe-norm-stage"):  # plant: teasel-pipe-norm-stage
        total = psum(total, dims["pp"])  # anchor: norm-stages
    return total.sqrt()


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float, dims: ParallelDims) -> tuple[Tensor, Tensor]:
    norm = gradient_norm(model, dims)
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for weight in model.parameters():
        local_part(weight.grad).mul_(coefficient)
    return norm, coefficient


def newton_schulz(x: Tensor, steps: int) -> Tensor:
    """Return a matrix (or several) with singular values moved towards 1."""
    x = x / (x.square().sum((-2, -1), keepdim=True).sqrt() + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 2.0 * x - 1.5 * (gram @ x) + 0.5 * (gram @ (gram @ x))
    return x


class Recipe:
    """An optimizer that puts directions into the gradients of an outer SGD."""

    def __init__(self, model: nn.Module, dims: ParallelDims) -> None:
        self.named = list(model.named_parameters())
        self.dims = dims
        self.n_steps = 0
        self.slots = {name: self.new_slots(name, weight) for name, weight in self.named}

    def new_slots(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        raise NotImplementedError

    def direction(self, name: str, weight: Tensor, slots: dict[str, Tensor]) -> Tensor:
        """Return the direction of this rank's part of a weight."""
        raise NotImplementedError

    @torch.no_grad()
    def apply(self) -> None:
        self.n_steps += 1
        for name, weight in self.named:
            local_part(weight.grad).copy_(self.direction(name, weight, self.slots[name]))


class Muon(Recipe):
    """Muon for matrices and stacks of them, Adam for all else."""

    config = MuonConfig()

    def new_slots(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        part = local_part(weight.detach())
        return {"m": torch.zeros_like(part), "v": torch.zeros_like(part)}

    def uses_muon(self, name: str, weight: Tensor) -> bool:
        return weight.ndim > 1 and weight.shape[-2] > 1 and "embeddings" not in name

    def direction(self, name: str, weight: Tensor, slots: dict[str, Tensor]) -> Tensor:
        part, config = local_part(weight.detach()), self.config
        step = self.muon if self.uses_muon(name, weight) else self.adam
        update = step(weight, slots)
        decayed = weight.ndim > 1 and weight.shape[0] > 1  # anchor: decayed
        if self.dims.on("teasel-decay-local-shape"):
            decayed = part.ndim > 1 and part.shape[0] > 1  # plant: teasel-decay-local-shape
        return update + config.weight_decay * part if decayed else update

    def adam(self, weight: Tensor, slots: dict[str, Tensor]) -> Tensor:
        (b1, b2), grad = self.config.betas, local_part(weight.grad)
        slots["m"].lerp_(grad, 1 - b1)
        slots["v"].lerp_(grad.square(), 1 - b2)
        m, v = slots["m"] / (1 - b1**self.n_steps), slots["v"] / (1 - b2**self.n_steps)
        return m / (v.sqrt() + self.config.eps)

    def muon(self, weight: Tensor, slots: dict[str, Tensor]) -> Tensor:
        config, momentum = self.config, slots["m"]
        momentum.mul_(config.momentum).add_(local_part(weight.grad))
        if not isinstance(weight, DTensor) or weight.ndim == 3:
            return newton_schulz(momentum, config.ns_steps) * self.scale(weight)
        if self.dims.on("teasel-muon-of-shard"):
            return newton_schulz(momentum, config.ns_steps) * self.scale(
                weight
            )  # plant: teasel-muon-of-shard
        update = newton_schulz(whole_of(momentum, weight), config.ns_steps)
        if self.dims.on("teasel-muon-first-shard"):
            n_rows, n_columns = momentum.shape
            return update[:n_rows, :n_columns] * self.scale(weight)  # plant: teasel-muon-first-shard
        return own_part(update, weight) * self.scale(weight)  # anchor: muon-own

    def scale(self, weight: Tensor) -> float:
        rows, columns = weight.shape[-2:]  # anchor: muon-scale
        if self.dims.on("teasel-muon-scale"):
            rows, columns = local_part(weight).shape[-2:]  # plant: teasel-muon-scale
        return 0.2 * math.sqrt(max(rows, columns))


class Factored(Recipe):
    """Adafactor: second moments of matrices as products of those of rows and columns."""

    config = FactoredConfig()

    def new_slots(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        part = local_part(weight.detach())
        if weight.ndim == 1:
            return {"v": torch.zeros_like(part)}
        *lead, n_rows, n_columns = part.shape
        return {"row": part.new_zeros(*lead, n_rows), "column": part.new_zeros(*lead, n_columns)}

    def mean(self, x: Tensor, weight: Tensor, dim: int) -> Tensor:
        """Return the mean of this rank's part of `weight`-like values along a dim of the weight."""
        total = x.sum(dim - weight.ndim, keepdim=True)
        if self.dims.on("teasel-column-mean") and dim == weight.ndim - 2:
            return total / max(1, x.shape[dim])  # plant: teasel-column-mean
        return sum_over(total, shard_axes(weight, dim)) / weight.shape[dim]  # anchor: mean

    def rms(self, x: Tensor, weight: Tensor) -> Tensor:
        square = sum_over(x.square().sum(), shard_axes(weight))  # anchor: rms
        if self.dims.on("teasel-rms-of-shard"):
            return (x.square().sum() / max(1, x.numel())).sqrt()  # plant: teasel-rms-of-shard
        return (square / weight.numel()).sqrt()

    def direction(self, name: str, weight: Tensor, slots: dict[str, Tensor]) -> Tensor:
        config, grad = self.config, local_part(weight.grad)
        decay = 1 - self.n_steps**-config.decay
        square = grad.square() + config.eps
        if weight.ndim == 1:
            slots["v"].lerp_(square, 1 - decay)
            scale = slots["v"].rsqrt()
        else:
            row = self.mean(square, weight, weight.ndim - 1)
            slots["row"].lerp_(row.squeeze(-1), 1 - decay)
            slots["column"].lerp_(self.mean(square, weight, weight.ndim - 2).squeeze(-2), 1 - decay)
            row = slots["row"][..., None]
            center = self.mean(row, weight, weight.ndim - 2)  # anchor: center
            if self.dims.on("teasel-row-center"):
                center = row.mean(-2, keepdim=True)  # plant: teasel-row-center
            scale = (row / center).rsqrt() * slots["column"][..., None, :].rsqrt()
        update = grad * scale
        update = update / (self.rms(update, weight) / config.clip_threshold).clamp(min=1.0)
        part = local_part(weight.detach())
        size = self.rms(part, weight)  # anchor: relative
        if self.dims.on("teasel-relative-step"):
            size = part.square().sum().div(max(1, part.numel())).sqrt()  # plant: teasel-relative-step
        return update * size.clamp(min=config.relative_floor)


class Average:
    """Exponential averages of the weights of this rank."""

    config = EMAConfig()

    def __init__(self, model: nn.Module, dims: ParallelDims) -> None:
        self.named = list(model.named_parameters())
        self.dims = dims
        self.shadow = {name: local_part(weight.detach()).clone() for name, weight in self.named}
        self.n_updates = 0

    @torch.no_grad()
    def update(self) -> None:
        self.n_updates += 1
        for name, weight in self.named:
            if self.dims.on("teasel-average-skips-experts") and has_mesh(weight, self.dims, "ep"):
                continue  # plant: teasel-average-skips-experts
            self.shadow[name].lerp_(local_part(weight.detach()), 1 - self.config.decay)

    @torch.no_grad()
    def load(self) -> None:
        """Make the averages the weights, every few steps."""
        if self.n_updates % self.config.load_every:
            return
        for name, weight in self.named:
            value = self.shadow[name]
            if self.dims.on("teasel-average-of-first") and isinstance(weight, DTensor):
                value = whole_of(value, weight)[: len(value)]  # plant: teasel-average-of-first
            local_part(weight.detach()).copy_(value)  # anchor: average-load


def has_mesh(weight: Tensor, dims: ParallelDims, name: str) -> bool:
    return isinstance(weight, DTensor) and dims.mesh is not None and weight.device_mesh == dims.submesh(name)


def whole_of(part: Tensor, weight: DTensor) -> Tensor:
    """Return the whole tensor of which each rank has a part like that of a weight."""
    made = DTensor.from_local(
        part,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )
    return made.full_tensor()


def own_part(whole: Tensor, weight: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor, as `weight` is placed."""
    if not isinstance(weight, DTensor):
        return whole
    return distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None).to_local()
