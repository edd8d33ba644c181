"""Updates as transformations of gradients: the optimizer subtracts what they make, times the rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rowan.registry import op, pick
from rowan.topology import Topology, here, use
from rowan.wire import local


@dataclass
class Adam:
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    ratio: float = 0.2  # of the rate of other weights
    decay: float = 0.1
    count: int = 0
    first: dict[str, Tensor] = field(default_factory=dict)
    second: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, named: dict[str, nn.Parameter]) -> None:
        odd, (b1, b2) = here().odd, self.betas
        self.count += 1  # anchor: count
        for name, parameter in named.items():
            grad = local(parameter.grad)
            first = self.first.setdefault(name, torch.zeros_like(grad)).lerp_(grad, 1 - b1)
            second = self.second.setdefault(name, torch.zeros_like(grad)).lerp_(grad.square(), 1 - b2)
            if odd("rowan-adam-count"):
                self.count += 1  # plant: rowan-adam-count
            root = (second / (1 - b2**self.count)).sqrt() + self.eps
            step = self.ratio * first / (1 - b1**self.count) / root
            if parameter.ndim > 1 or odd("rowan-adam-decay"):  # plant: rowan-adam-decay
                step = step + self.decay * local(parameter)
            grad.copy_(step)


def orthogonal(m: Tensor) -> Tensor:
    """Newton-Schulz iterations of a matrix, or of a stack of matrices."""
    x = m.mT if m.shape[-2] > m.shape[-1] else m
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(4):
        g = x @ x.mT
        x = 2.0 * x - 1.5 * (g @ x) + 0.5 * (g @ (g @ x))
    return x.mT if m.shape[-2] > m.shape[-1] else x


@dataclass
class Muon:
    momentum: float = 0.9
    decay: float = 0.05
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, named: dict[str, nn.Parameter]) -> None:
        for name, parameter in named.items():
            buffer = self.buffers.setdefault(name, torch.zeros_like(parameter))
            buffer.mul_(self.momentum).add_(parameter.grad)
        wholes = {}
        for name, parameter in named.items():
            nesterov = parameter.grad + self.momentum * self.buffers[name]
            wholes[name] = gathered(nesterov)
        for name, update in pick("spread")(wholes).items():
            parameter = named[name]
            rows, columns = update.shape[-2:]  # anchor: factor
            if here().odd("rowan-muon-factor"):
                rows, columns = local(parameter).shape[-2:]  # plant: rowan-muon-factor
            update = update * 0.4 * max(rows, columns) ** 0.5
            local(parameter.grad).copy_(own_part(update, parameter) + self.decay * local(parameter))


def gathered(m: Tensor) -> Tensor:
    """Return whole matrices: those of `tp` are gathered, stacks of experts stay divided."""
    if not isinstance(m, DTensor) or here().odd("rowan-muon-local"):
        return local(m)  # plant: rowan-muon-local
    if m.ndim > 2 and "dp_shard" in m.device_mesh.mesh_dim_names and m.device_mesh.ndim == 1:
        return m.to_local()
    return m.full_tensor()  # anchor: gathered


def own_part(update: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's block of an update."""
    if not isinstance(parameter, DTensor) or update.shape == parameter.to_local().shape:
        return update
    for axis, placement in enumerate(parameter.placements):
        if placement.is_shard():
            mesh = parameter.device_mesh
            update = update.chunk(mesh.size(axis), placement.dim)[mesh.get_local_rank(axis)]
    return update


@op("spread")
def spread(wholes: dict[str, Tensor]) -> dict[str, Tensor]:
    """Orthogonalize each matrix on one of the ranks that share it, and broadcast the result."""
    axes = ("dp_replicate", "cp")
    group = here().group(*axes)
    if group is None:
        return {name: orthogonal(m) for name, m in wholes.items()}
    ranks, rank, works = dist.get_world_size(group), dist.get_rank(group), []
    done = {}
    for i, (name, m) in enumerate(sorted(wholes.items(), key=lambda item: -item[1].numel())):
        owner = i % ranks
        done[name] = orthogonal(m) if owner == rank else torch.empty_like(m)  # anchor: spread
        source = dist.get_global_rank(group, owner)
        works.append(dist.broadcast(done[name], source, group=group, async_op=True))  # anchor: spread
    for work in works:
        work.wait()
    return done


@op("spread", "rowan-same-redundant")
def everywhere(wholes: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every rank orthogonalizes all of them."""
    return {name: orthogonal(m) for name, m in wholes.items()}


@op("spread", "rowan-owner-order")
def spread_by_name(wholes: dict[str, Tensor]) -> dict[str, Tensor]:
    group = here().group("dp_replicate", "cp")
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    largest = sorted(wholes, key=lambda name: -wholes[name].numel())
    done = {name: orthogonal(wholes[name]) for name in largest[rank::ranks]}
    for i, name in enumerate(wholes):
        part = done.setdefault(name, wholes[name].clone())
        dist.broadcast(part, dist.get_global_rank(group, i % ranks), group=group)  # plant: rowan-owner-order
    return done


def label(name: str, parameter: nn.Parameter) -> str:
    """Return which rule updates a parameter."""
    flat = parameter.ndim < 2 or "taps" in name or "router" in name
    if here().odd("rowan-label-embed"):
        return "adam" if flat else "muon"  # plant: rowan-label-embed
    return "adam" if flat or "embed" in name else "muon"  # anchor: label


@dataclass
class Rules:
    """The rule of each parameter by its label."""

    rules: dict[str, Callable[[dict[str, nn.Parameter]], None]]

    @torch.no_grad()
    def __call__(self, net: nn.Module, topology: Topology) -> None:
        with use(topology):
            parts: dict[str, dict[str, nn.Parameter]] = {key: {} for key in self.rules}
            for name, parameter in net.named_parameters():
                parts[label(name, parameter)][name] = parameter
            for key, part in parts.items():
                self.rules[key](part)


def make_rules() -> Rules:
    return Rules({"muon": Muon(), "adam": Adam()})
